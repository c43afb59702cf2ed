"""From a JSONL file to examples: which tokens a model sees, and which of them it learns.

`read_rows` checks a file, `encode_rows` makes examples of it with the model's own tokenizer and the
template that will serve; both report every bad row by its line. `split` and `order` are pure: they
depend on a seed and nothing else. `preview` shows an example as the model sees it.
"""

from vox_host.training.data.encoding import Encoded, Example, encode_rows
from vox_host.training.data.order import Split, order, split
from vox_host.training.data.preview import PreviewPiece, marked_preview, preview, render_preview
from vox_host.training.data.problems import Problem
from vox_host.training.data.rows import Rows, read_rows
from vox_host.training.data.shipped import shipped_data
from vox_host.training.data.template_choice import TemplateChoice, choose_template

__all__ = [
    "Encoded",
    "Example",
    "PreviewPiece",
    "Problem",
    "Rows",
    "Split",
    "TemplateChoice",
    "choose_template",
    "encode_rows",
    "order",
    "preview",
    "read_rows",
    "marked_preview",
    "render_preview",
    "shipped_data",
    "split",
]
