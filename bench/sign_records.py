"""Give parity records of certificate version 1, which had no digest of their own, the form of version 2.

    python bench/sign_records.py FILE...

Nothing that a record says is changed. With which options it was made it did not say, and still doesn't.
What the digest binds is what the file says now: whoever runs this answers for that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / place) for place in ("host/src", "plugin-api/src")]

from vox_host.parity.certificate import VERSION, signed  # noqa: E402


def main() -> int:
    """Sign each file in place; one that is of version 2 stays as it is."""
    for name in sys.argv[1:]:
        path = Path(name)
        facts = json.loads(path.read_text("utf-8"))
        if facts["certificate"] == VERSION:
            continue
        for side in facts["sides"]:
            side.setdefault("taken", [])
        facts = {**facts, "certificate": VERSION, "options": None, "left_out": []}
        path.write_text(json.dumps(signed(facts), indent=2, ensure_ascii=False) + "\n", "utf-8")
        print(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
