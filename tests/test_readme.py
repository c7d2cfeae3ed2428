"""The README's code runs, in order, each block on its own."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=[f"block {i}" for i in range(len(BLOCKS))])
def test_a_block_of_code_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})


def test_the_commands_it_names_are_there() -> None:
    text = README.read_text()
    scripts = set(re.findall(r"scripts/(\w+\.py)", text))
    assert {"train_criteo.py", "train_avazu.py", "train_table.py", "train_synthetic.py"} <= scripts
    assert not [name for name in scripts if not (README.parent / "scripts" / name).exists()]


def test_the_schema_it_shows_is_one(tmp_path: Path) -> None:
    from dlrm.data import Schema

    (shown,) = re.findall(r"^```yaml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "clicks.yaml").write_text(shown)
    schema = Schema.load(tmp_path / "clicks.yaml")
    assert schema.features == ("user", "shop", "words", "hour_of_day")
