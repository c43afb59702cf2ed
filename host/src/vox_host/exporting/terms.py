"""The base model's terms, with whatever leaves vox-host: they go where its weights or their updates go."""

from __future__ import annotations

from pathlib import Path

from vox_host.exporting.gguf_write import Value
from vox_host.models.installed import InstalledModel
from vox_host.models.model_manifest import LICENSE_FOLDER
from vox_host.whole_folder import write_file

__all__ = ["gguf_license", "write_terms"]


def write_terms(base: InstalledModel, folder: Path, what: str) -> list[str]:
    """Write README.md, which names the licence and where its text is, and the texts that came with the base.

    Args:
        folder: the one that is exported; it has none of these files.
        what: a sentence that says what lies in the folder.

    Returns:
        The names of the texts; empty where the base came without any.

    Raises:
        OSError: it can't be written, or the base's texts can't be read.
    """
    texts = []
    for terms in sorted((base.path / LICENSE_FOLDER).glob("*")):
        write_file(folder / terms.name, terms.read_bytes())
        texts.append(terms.name)
    # What was noted at the import may be a path of that machine: it helps where there is nothing better.
    is_link = _is_link(base.license_terms)
    where = ", ".join([*([base.license_terms] if is_link or not texts else []), *texts])
    link = f"license_link: {base.license_terms}\n" if is_link else ""
    text = (
        f"---\nlicense: {base.license}\n{link}---\n{what}\n"
        f"The base model's terms apply ({base.license}): {where}\n"
    )
    write_file(folder / "README.md", text.encode())
    return texts


def gguf_license(base: InstalledModel) -> dict[str, Value]:
    """Return what a GGUF file says of its licence, since such a file goes about without its folder."""
    link: dict[str, Value] = (
        {"general.license.link": base.license_terms} if _is_link(base.license_terms) else {}
    )
    return {"general.license": base.license, **link}


def _is_link(terms: str) -> bool:
    return terms.startswith(("https://", "http://"))
