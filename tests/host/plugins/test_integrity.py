"""Tree digests, receipts, and the check before a start."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vox_host.errors import IntegrityError, PluginError
from vox_host.installation import Installed
from vox_host.installed_tree import (
    describe_interpreter,
    digest_of_file,
    listing_of_tree,
    parse_listing,
    read_entries,
)
from vox_host.integrity import verify_installation
from vox_host.receipt import Interpreter, Receipt, load_receipt
from vox_host.stat_cache import write_aside


def digest(root: Path) -> bytes:
    return listing_of_tree(read_entries(root), None)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text("x = 1\n")
    (root / "b.py").write_text("y = 2\n")
    (root / "link").symlink_to("pkg")
    return root


CHANGES: dict[str, Callable[[Path], object]] = {
    "a changed byte": lambda root: (root / "b.py").write_text("y = 3\n"),
    "an added module": lambda root: (root / "c.py").write_text(""),
    "an added .pth file": lambda root: (root / "evil.pth").write_text("import evil\n"),
    "an added empty folder": lambda root: (root / "namespace").mkdir(),
    "a removed file": lambda root: (root / "b.py").unlink(),
    "a renamed file": lambda root: (root / "b.py").rename(root / "d.py"),
    "a link elsewhere": lambda root: ((root / "link").unlink(), (root / "link").symlink_to("b.py")),
    "a link instead of a file": lambda root: (
        (root / "b.py").unlink(),
        (root / "b.py").symlink_to("pkg/__init__.py"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_tree_changes_its_digest(tree: Path, change: str) -> None:
    before = digest(tree)
    CHANGES[change](tree)
    assert digest(tree) != before


def test_the_digest_depends_on_contents_alone(tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(tree, copy, symlinks=True)
    os.utime(copy / "b.py", (1, 1))
    assert digest(copy) == digest(tree)


def test_the_listing_is_sorted_by_the_bytes_of_the_path(tmp_path: Path) -> None:
    for name in ("b", "a-b", "a", "é", "Z"):
        (tmp_path / name).write_text("")
    assert list(parse_listing(digest(tmp_path))) == ["Z", "a", "a-b", "b", "é"]


def test_names_that_are_not_utf_8_are_listed_too(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.py")).write_text("")
    except OSError:
        pytest.skip("this file system holds UTF-8 names only")
    assert list(parse_listing(digest(tmp_path))) == [os.fsdecode(b"\xff.py")]


def test_a_newline_in_a_name_forges_no_entry(tmp_path: Path) -> None:
    (tmp_path / 'a\n["file", "b", "00"]').write_text("")
    assert len(parse_listing(digest(tmp_path))) == 1


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside", "pkg/../../outside"])
def test_a_link_that_leads_outside_is_refused(tree: Path, target: str) -> None:
    (tree.parent / "outside").write_text("")
    (tree / "pkg" / "escape").symlink_to(target if target[0] == "/" else f"../{target}")
    with pytest.raises(IntegrityError) as caught:
        read_entries(tree)
    assert caught.value.code == "link-escape"
    assert dict(caught.value.facts)["link"] == "pkg/escape"


def test_only_the_recorded_interpreter_may_lie_outside(tree: Path) -> None:
    (tree / "python").symlink_to(sys.executable)
    with pytest.raises(IntegrityError):
        read_entries(tree)
    interpreter = describe_interpreter(tree / "python", version="3", implementation="cpython")
    assert [e.path for e in read_entries(tree, interpreter=interpreter) if e.kind == "link"] == [
        "link",
        "python",
    ]


def test_another_interpreter_is_another_digest(tree: Path) -> None:
    one = Interpreter(path="/p", version="3.11.7", implementation="cpython", size=1, sha256="0" * 64)
    other = one.model_copy(update={"version": "3.11.8"})
    entries = read_entries(tree)
    assert listing_of_tree(entries, one) != listing_of_tree(entries, other)


def test_a_named_pipe_in_a_tree_is_refused(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(IntegrityError) as caught:
        read_entries(tree)
    assert caught.value.code == "odd-file"


# --- an installed plugin -------------------------------------------------------------------------


def test_an_untouched_installation_passes_and_reads_nothing_again(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    first = verify_installation(installed_toy.receipt, plugins_dir)
    assert first.files > 10
    assert first.hashed == 0
    assert verify_installation(installed_toy.receipt, plugins_dir, full=True).hashed > 10


def tree_of(receipt: Receipt, plugins_dir: Path) -> Path:
    return plugins_dir / receipt.environment


def flip_a_byte(path: Path) -> tuple[str, str]:
    """Change one byte in place, size and modification time kept; return both digests."""
    before, times = digest_of_file(path), path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return before, digest_of_file(path)


@pytest.mark.parametrize("full", [False, True])
def test_one_flipped_byte_is_named_with_both_digests(
    installed_toy: Installed, plugins_dir: Path, full: bool
) -> None:
    receipt = installed_toy.receipt
    path = tree_of(receipt, plugins_dir) / receipt.packages / "vox_toy" / "__init__.py"
    expected, found = flip_a_byte(path)
    with pytest.raises(IntegrityError) as caught:
        verify_installation(receipt, plugins_dir, full=full)
    facts = dict(caught.value.facts)
    assert caught.value.exit_code == 4
    assert facts["file"] == str(path)
    assert expected in facts["expected"]
    assert found in facts["found"]


def test_every_kind_of_file_in_the_tree_is_covered(installed_toy: Installed, plugins_dir: Path) -> None:
    receipt = installed_toy.receipt
    root = tree_of(receipt, plugins_dir)
    compiled = next(root.rglob("*.pyc"))
    for path in (root / "pyvenv.cfg", compiled, root / receipt.manifest):
        original = path.read_bytes()
        flip_a_byte(path)
        with pytest.raises(IntegrityError) as caught:
            verify_installation(receipt, plugins_dir)
        assert dict(caught.value.facts)["file"] == str(path)
        path.write_bytes(original)
        verify_installation(receipt, plugins_dir)


def test_an_added_and_a_removed_file_are_named(installed_toy: Installed, plugins_dir: Path) -> None:
    receipt = installed_toy.receipt
    added = tree_of(receipt, plugins_dir) / receipt.packages / "evil.pth"
    added.write_text("import os\n")
    with pytest.raises(IntegrityError) as caught:
        verify_installation(receipt, plugins_dir)
    assert dict(caught.value.facts)["file"] == str(added)
    assert dict(caught.value.facts)["expected"].startswith("no such file")
    added.unlink()
    removed = tree_of(receipt, plugins_dir) / receipt.manifest
    removed.unlink()
    with pytest.raises(IntegrityError) as caught:
        verify_installation(receipt, plugins_dir)
    assert dict(caught.value.facts)["found"] == "no such file"


def test_a_listing_that_was_changed_with_the_tree_is_noticed(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    receipt = installed_toy.receipt
    root = tree_of(receipt, plugins_dir)
    before, after = flip_a_byte(root / receipt.manifest)
    listing = root.with_name(root.name + ".tree")
    listing.write_text(listing.read_text().replace(before, after))
    with pytest.raises(IntegrityError) as caught:
        verify_installation(receipt, plugins_dir)
    assert "(listing)" in dict(caught.value.facts)["file"]


def test_a_lying_cache_of_another_tree_is_not_used(installed_toy: Installed, plugins_dir: Path) -> None:
    receipt = installed_toy.receipt
    cache = next((plugins_dir / ".checked").iterdir())
    for text in ("{", "[]", '{"tree_digest": 3}', json.dumps({"tree_digest": "x", "files": {"a": 1}})):
        cache.write_text(text)
        assert verify_installation(receipt, plugins_dir).hashed > 10


def test_a_changed_interpreter_is_refused(
    installed_toy: Installed, plugins_dir: Path, tmp_path: Path
) -> None:
    receipt = installed_toy.receipt
    assert receipt.interpreter is not None
    copy = tmp_path / "python"
    copy.write_bytes(b"another interpreter")
    moved = receipt.interpreter.model_copy(update={"path": str(copy)})
    with pytest.raises(IntegrityError) as caught:
        verify_installation(receipt.model_copy(update={"interpreter": moved}), plugins_dir)
    assert caught.value.code == "interpreter-changed"
    assert receipt.interpreter.sha256 in dict(caught.value.facts)["expected"]
    assert digest_of_file(copy) in dict(caught.value.facts)["found"]


def test_a_missing_tree_is_a_matter_of_integrity(installed_toy: Installed, plugins_dir: Path) -> None:
    shutil.rmtree(tree_of(installed_toy.receipt, plugins_dir))
    with pytest.raises(IntegrityError):
        verify_installation(installed_toy.receipt, plugins_dir)


# --- receipts ------------------------------------------------------------------------------------


def test_a_receipt_survives_its_file(installed_toy: Installed, plugins_dir: Path) -> None:
    file = plugins_dir / "vox-toy.json"
    assert json.loads(file.read_bytes())["receipt_digest"]
    assert load_receipt(file) == installed_toy.receipt


CHANGES_OF_A_RECEIPT: dict[str, Callable[[dict[str, Any]], object]] = {
    "the archive's digest": lambda r: r.update(archive_sha256=other_hex(r["archive_sha256"])),
    "the source's digest": lambda r: r.update(source_digest=other_hex(r["source_digest"])),
    "a distribution's name": lambda r: r["distributions"][0].update(name="another"),
    "a distribution's RECORD": lambda r: r["distributions"][0].update(
        record_sha256=other_hex(r["distributions"][0]["record_sha256"])
    ),
    "the interpreter's size": lambda r: r["interpreter"].update(size=r["interpreter"]["size"] + 1),
    "the trust": lambda r: r.update(trust="verified"),
    "its own digest": lambda r: r.update(receipt_digest=other_hex(r["receipt_digest"])),
}


def other_hex(digest: str) -> str:
    return digest[:-1] + ("1" if digest[-1] == "0" else "0")


@pytest.mark.parametrize("change", CHANGES_OF_A_RECEIPT)
def test_a_changed_receipt_is_refused_with_both_digests(
    installed_toy: Installed, plugins_dir: Path, change: str
) -> None:
    path = plugins_dir / "vox-toy.json"
    fields = json.loads(path.read_text())
    CHANGES_OF_A_RECEIPT[change](fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(IntegrityError) as caught:
        load_receipt(path)
    assert caught.value.code == "receipt-changed"
    facts = dict(caught.value.facts)
    assert facts["expected"] == f"sha256:{fields['receipt_digest']}" != facts["found"]


def test_a_receipt_of_an_older_host_has_no_digest_of_its_own(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    path = plugins_dir / "vox-toy.json"
    fields = json.loads(path.read_text())
    del fields["receipt_digest"]
    path.write_text(json.dumps(fields))
    assert load_receipt(path) == installed_toy.receipt


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"trust": "certain"},
        {"surprise": 1},
        {"environment": "/etc"},
        {"environment": "../x"},
        {"manifest": "../../Plugin.toml"},
        {"plugin": "vox-other"},
    ],
)
def test_a_receipt_that_is_not_right_is_refused(
    installed_toy: Installed, plugins_dir: Path, change: dict[str, object]
) -> None:
    path = plugins_dir / "vox-toy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "receipt_digest": None, **change}))
    with pytest.raises(PluginError) as caught:
        load_receipt(path)
    assert caught.value.code == "receipt-invalid"


def test_a_file_is_replaced_in_one_step_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_aside(path, b"one")
    write_aside(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]
