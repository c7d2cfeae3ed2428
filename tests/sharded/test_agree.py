"""An error on one rank is an error on all, each its own or a RemoteFault naming the first, and the lanes go on."""

import pytest
import ranks

from embcache.errors import IdOutOfRange, RemoteFault, StorageFull
from embcache.sharded.agree import agree, agreed, together

ERRORS = {
    "id": IdOutOfRange("user", "clicks", 3, 9, 8),
    "disk": StorageFull(10, 5, "run/a"),
    "key": KeyError("no such name"),
}


def fails_on(rank, failing, kind):
    lanes = rank.lanes()
    seen = []
    for attempt in range(3):
        try:
            if attempt == 0:
                agree(lanes.ids, ERRORS[kind] if rank.rank in failing else None)
            elif attempt == 1:
                with agreed(lanes.grads):
                    if rank.rank in failing:
                        raise ERRORS[kind]
            else:
                seen.append(together(lanes.ids, lambda: int("x" if rank.rank in failing else "5")))
                continue
            seen.append(None)
        except Exception as error:
            remote = isinstance(error, RemoteFault)
            bases = [b.__name__ for b in (IndexError, OSError, KeyError, ValueError) if isinstance(error, b)]
            seen.append((remote, error.rank if remote else None, error.kind if remote else None, bases, str(error)))
    return seen, lanes.ids.header([[rank.rank]] * rank.world)[:, 0].tolist()


@pytest.mark.parametrize(("kind", "base"), [("id", "IndexError"), ("disk", "OSError"), ("key", "KeyError")])
@pytest.mark.parametrize("failing", [[1], [2, 0], []])
def test_all_ranks_raise(kind, base, failing):
    results = ranks.run(3, fails_on, failing=failing, kind=kind, delays=1)
    name, text = type(ERRORS[kind]).__name__, str(ERRORS[kind])
    for rank, (seen, after) in enumerate(results):
        assert after == [0, 1, 2]
        if not failing:
            assert seen == [None, None, 5]
            continue
        first = min(failing)
        for got in seen[:2]:
            if rank in failing:
                assert got == (False, None, None, [base], text)
            else:
                assert got == (True, first, name, [base], f"rank {first}: {name}: {text}")
        assert seen[2][0] == (rank not in failing)
        assert seen[2][3] == ["ValueError"]
