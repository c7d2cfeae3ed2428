"""Schemas: built in, from files, and what is refused."""

import json

import pytest

from dlrm.data import Categorical, Dense, Label, Schema, SchemaError, Time


def test_criteo_and_avazu_have_the_published_columns() -> None:
    criteo, avazu = Schema.load("criteo"), Schema.load("avazu")
    assert (len(criteo.columns), len(criteo.dense), len(criteo.features)) == (40, 13, 26)
    assert all(c.encoding == "hex" for c in criteo.categorical)
    assert len(avazu.features) == 23
    assert avazu.features[-2:] == ("hour_of_day", "weekday")
    assert avazu.dense_features == ("hour_sin", "hour_cos")
    assert "id" not in avazu.used_columns


def test_yaml_and_json_files_and_round_trip(tmp_path) -> None:
    text = """
label: {column: rating, threshold: 4}
dense: [age]
categorical:
  - user
  - {column: seen, encoding: decimal, separator: "|", table: movie}
  - {column: movie, encoding: decimal}
time: {column: when, format: unix, categorical: [hour_of_day]}
missing: ["NA"]
"""
    (tmp_path / "s.yaml").write_text(text)
    schema = Schema.load(tmp_path / "s.yaml")
    assert schema.label == Label("rating", 4)
    assert schema.features == ("user", "seen", "movie", "hour_of_day")
    assert schema.tables == ("user", "movie", "movie", "hour_of_day")
    assert schema.bags == (False, True, False, False)
    (tmp_path / "s.json").write_text(json.dumps(schema.to_dict()))
    assert Schema.load(tmp_path / "s.json") == schema


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "needs a label"),
        ([], "a schema is a mapping"),
        ({"label": "y", "dens": []}, "unknown dens; known are"),
        ({"label": "y", "categorical": [{"column": "a", "coding": "hex"}]}, "categorical: unknown coding"),
        ({"label": "y", "categorical": [{"column": "a", "encoding": "hexa"}]}, "encoding of 'a': expected one of hex"),
        ({"label": "y", "categorical": ["a", "a"]}, "sparse features: a given twice"),
        ({"label": "y", "dense": ["y"]}, "a column has one role"),
        ({"label": "y", "header": False}, "needs `columns`"),
        ({"label": "y", "columns": ["x"]}, "columns: y missing"),
        ({"label": "y", "delimiter": "ab"}, "delimiter: expected one ASCII character, found 'ab'"),
        ({"label": "y", "quote": ","}, "quote: ',' already means something else"),
        ({"label": "y", "time": {"column": "t", "format": "epoch"}}, "format of 't'"),
        ({"label": {"column": "y", "threshold": 1, "positive": ["a"]}}, "not both"),
        ({"label": 7}, "label: expected a column name or a mapping, found 7"),
        ({"label": {"threshold": 1}}, "label: .*column"),
        ({"label": {"column": "y", "threshold": "high"}}, "label: threshold = 'high', expected a number"),
        ({"label": {"column": "y", "positive": [1]}}, r"positive = \(1,\), expected a list, each a text \(in quotes\)"),
        ({"label": "y", "missing": [-1]}, r"missing = \(-1,\), expected a list, each a text"),
        ({"label": "y", "header": "perhaps"}, "header = 'perhaps', expected true or false"),
        ({"label": "y", "categorical": "user"}, "categorical: expected a list, found 'user'"),
        ({"label": "y", "categorical": [{"column": "a", "separator": 7}]}, "separator = 7, expected a text"),
    ],
)
def test_contradictions_are_named(data, message) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.from_dict(data)


def test_an_unknown_name_says_what_may_be_given() -> None:
    with pytest.raises(SchemaError, match="give criteo, avazu, or a YAML or JSON file"):
        Schema.load("kaggle")


def test_dataclasses_make_the_same_schema() -> None:
    made = Schema(Label("y"), (Dense("d"),), (Categorical("c"),), Time("t", categorical=("weekday",)))
    data = {"label": "y", "dense": ["d"], "categorical": ["c"], "time": {"column": "t", "categorical": ["weekday"]}}
    assert Schema.from_dict(data) == made


@pytest.mark.parametrize("name", ["s.yaml", "s.json"])
@pytest.mark.parametrize("text", [b"label: {column: [", b"label: \xff", b"- label"])
def test_a_file_that_is_no_schema_is_named(tmp_path, name, text) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(SchemaError, match=rf"{name}: "):
        Schema.load(tmp_path / name)
