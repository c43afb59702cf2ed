"""Training on the grid kernels, run on the CPU: any shape, whole runs, and planted mistakes.

The cases of `grid_shim.training_shapes` and the conformance vectors run in `test_grid_kernels`.
"""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.test_quantised_base import bases  # noqa: F401 - a fixture
from grid_shim import training_shapes as shapes
from grid_shim.check import caught, changed, results
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import a_config, finish, read, some_examples
from mens_core.trainer import Trainer
from mens_core.training_ops import DropoutKey

few = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
samples = st.integers(20_000, 60_000)
small = st.integers(1, 20)
around_chunks = st.one_of(st.integers(1, 140), st.sampled_from([127, 128, 129, 255, 257, 300]))
lengths = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from([127, 128, 129, 200])), min_size=1, max_size=4
)
ragged = lengths.filter(any)


@pytest.fixture
def same(lane):
    """Compares a case on the Metal form with the scalar reference."""
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    def check(case):
        assert results(case, lane("metal")) == results(case, ReferenceTrainingOps())

    return check


# --- any shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", shapes.FORMATS)
@few
@given(sample=samples, rows=small, outputs=around_chunks, blocks=st.integers(1, 3))
def test_linear_backward(same, format_, sample, rows, outputs, blocks):
    columns = shapes.columns_of(format_, blocks)
    same(partial(shapes.linear_backward, sample, format_, rows, outputs, columns))


@few
@given(sample=samples, of=ragged, p=around_chunks, q=small, is_turned=st.booleans())
def test_example_products(same, sample, of, p, q, is_turned):
    same(partial(shapes.example_products, sample, of, *((q, p) if is_turned else (p, q))))


@few
@given(sample=samples, rows=small, heads=st.integers(1, 4), width=around_chunks)
def test_norm_backward(same, sample, rows, heads, width):
    same(partial(shapes.norm_backward, sample, rows, heads, width))


@few
@given(
    sample=samples,
    heads=st.integers(1, 3),
    pairs=st.integers(1, 40),
    rows=small,
    width=around_chunks,
    operator=st.sampled_from(["silu_gate_backward", "gelu_gate_backward"]),
)
def test_rope_gates_and_softcap_backward(same, sample, heads, pairs, rows, width, operator):
    same(partial(shapes.rope_backward, sample, heads, pairs))
    same(partial(shapes.gate_backward, operator, sample, rows, width))
    same(partial(shapes.softcap_backward, sample, rows, width, 30.0))


@settings(few, max_examples=12)
@given(
    sample=samples,
    of=ragged,
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 16, 130]),
    window=st.sampled_from([None, 1, 5, 8, 127, 128, 129, 150]),
    softcap=st.sampled_from([None, 30.0]),
)
def test_attention_backward(same, sample, of, kv_heads, group, head_dim, window, softcap):
    heads = kv_heads * group
    same(partial(shapes.attention, sample, of, heads, kv_heads, head_dim, window, softcap))


@few
@given(sample=samples, of=ragged, every=st.sampled_from([1, 3, 150]), rows=small, width=around_chunks)
def test_losses_and_sums(same, sample, of, every, rows, width):
    same(partial(shapes.cross_entropy, sample, rows, width))
    same(partial(shapes.example_sums, sample, of, every))
    same(partial(shapes.embed_backward, sample, of, rows, 1 + width % 40))


@few
@given(
    sample=samples,
    rows=small,
    width=around_chunks,
    rate=st.sampled_from([0.0, 0.1, 0.5, 2.0**-33]),
    key=st.builds(
        DropoutKey,
        seed=st.integers(0, 2**64 - 1),
        step=st.integers(0, 2**32 - 1),
        layer=st.integers(0, 2**16 - 1),
    ),
)
def test_adapters_dropout_and_update(same, sample, rows, width, rate, key):
    same(partial(shapes.scaled, sample, rows, width, 0.30000001192092896))
    same(partial(shapes.dropout, sample, rows, width, rate, key))
    same(partial(shapes.sum_of_squares, sample, rows, width))
    same(partial(shapes.adamw, sample, rows, width))


def test_a_matrix_of_more_rows_than_a_launch_has(same):
    """The output matrix's adapter has a row for each token of the vocabulary."""
    same(partial(shapes.scaled, 20_000, 66_000, 2, 0.5))
    same(partial(shapes.adamw, 20_010, 66_000, 2))


# --- whole runs ----------------------------------------------------------------------------------------

SMALL = {
    "qwen3": BY_FAMILY["qwen3"] | {"num_hidden_layers": 2},
    "gemma3": BY_FAMILY["gemma3"] | {"num_hidden_layers": 2, "sliding_window_pattern": 2},
}


LENGTHS = {"qwen3": (2, 9, 131, 5), "gemma3": (9, 2, 30), "gemma3, quantised": (9, 2, 12)}
"""Of the examples; one goes on into a second KV block."""


def trained(path, ops, lengths):
    """Three steps with dropout and clipping."""
    trainer = Trainer(open_model(path, ops).model, ops, a_config(dropout=0.25, max_gradient_norm=0.5))
    return [finish(trainer.train_step(read(some_examples(lengths, seed=i)))) for i in range(3)]


@pytest.mark.parametrize("base", LENGTHS)
def test_a_run_gives_the_reference_s_adapter(lane, tmp_path, bases, base):  # noqa: F811
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    path = bases[0] if "quantised" in base else write_model(tmp_path, SMALL[base], seed=3)
    found, expected = (trained(path, ops, LENGTHS[base]) for ops in (lane("metal"), ReferenceTrainingOps()))
    assert found == expected
    assert len({outcome.adapter_digest for outcome in found}) == 3


# --- refusals --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(lane):
    ops = lane("metal")
    x = ops.from_host(np.zeros((3, 4), np.float32))
    y = ops.from_host(np.zeros((3, 5), np.float32))
    starts = np.array([0, 3], np.int32)
    with pytest.raises(ValueError, match=r"up: argument 1 \[3, 4\], argument 2 \[3, 5\] differ"):
        ops.add_scaled(x, y, 1.0, name="up")
    with pytest.raises(ValueError, match=r"dx: dy \[3, 5\] does not fit \[3, 4\]"):
        ops.linear_backward(y, ops.matrix(x, name="w"), name="dx")
    with pytest.raises(ValueError, match=r"\[0, 2\] does not divide 3 rows into examples"):
        ops.example_products(x, y, np.array([0, 2], np.int32), name="dw")
    with pytest.raises(ValueError, match="3 rows and 2 rows have no product"):
        ops.example_products(x, ops.from_host(np.zeros((2, 4), np.float32)), starts, name="dw")
    with pytest.raises(IndexError, match=r"loss: a token id is not in \[0, 4\)"):
        ops.cross_entropy(x, np.array([0, 1, 4], np.int32), name="loss")
    with pytest.raises(ValueError, match=r"position is not in \[0, 2147483648\)"):
        positions = np.array([0, -1, 2], np.int32)
        ops.dropout(x, 0.5, DropoutKey(1, 2, 3), positions, positions, name="d")
    with pytest.raises(ValueError, match="one for each, ascending"):
        ops.put_rows(x, np.array([2, 1, 0], np.int32), 5)
    with pytest.raises(ValueError, match=r"w: \[3\] is not a matrix"):
        ops.matrix(ops.from_host(np.zeros(3, np.float32)), name="w")
    with pytest.raises(ValueError, match="vox_take_rows: 65536 rows; a launch has at most 65535"):
        ops.take_rows(x, np.zeros(65_536, np.int32))


# --- planted mistakes ------------------------------------------------------------------------------------

MISTAKES = (
    {
        "the rotation forwards": (
            "rope_backward/3x40",
            ("VOX_ROPE(vox_rope_backward, rotated_back)", "VOX_ROPE(vox_rope_backward, rotated)"),
        ),
        "gate and up exchanged": (
            "silu_gate_backward/3x127",
            ("VOX_IN(float, gate, 1), VOX_IN(float, up, 2)", "VOX_IN(float, up, 1), VOX_IN(float, gate, 2)"),
        ),
        "a chunk's last term left out": (
            "linear_backward/q4_k/17x129x3",
            (
                "n - args.first, column, args, count);",
                "n - args.first, column, args, count - 1);",
            ),
        ),
        "the loss's share not taken off": (
            "cross_entropy/2x127",
            ("? target_gradient(share) : share", "? share : share"),
        ),
        "the scale on each pair": (
            "attention_backward/4/2x64/None/None",
            ("deltas[at]).score;", "deltas[at]).score * args.scale;"),
            ("f_mul(dq[rows + i * wide + c], args.scale)", "dq[rows + i * wide + c]"),
        ),
        "random words by their column": (
            "dropout/3x5",
            ("random.word[i], args.threshold", "random.word[3 - i], args.threshold"),
        ),
        "corrections exchanged": (
            "adamw/3x127",
            ("args.beta1, args.one_minus_beta1", "args.beta1, args.beta1"),
        ),
        "rows to the wrong place": (
            "rows moved",
            ("x[from * args.width", "x[VOX_THREAD_Y % 3 * args.width"),
        ),
    },
    {
        "a norm's sums exchanged": (
            "norm_backward/257",
            ("norm_share(sums.products,", "norm_share(sums.squares,"),
        ),
        "one chain for all of an example": (
            "example_products/128+129+1/17x129",
            ("p.v[t] = 0.0f;\n  for (int32_t n", "p.v[t] = is_first ? 0.0f : total.v[t];\n  for (int32_t n"),
            ("chunk_folded(is_first, total.v[t], p.v[t]);", "p.v[t];"),
        ),
        "losses in one chunk": (
            "example_sums/128+129+1",
            ("positions[i] / (int32_t)kChunk == chunk", "chunk >= 0"),
        ),
        "query heads from the last to the first": (
            "attention_backward/4/2x64/None/None",
            ("VOX_GROUP_X * group + h, channel", "VOX_GROUP_X * group + group - 1 - h, channel"),
        ),
        "the key's halves exchanged": (
            "dropout/4x203",
            (
                "(uint32_t)args.seed_low, (uint32_t)args.seed_high",
                "(uint32_t)args.seed_high, (uint32_t)args.seed_low",
            ),
        ),
        "a fault's row is its element": (
            "training faults",
            ("VOX_WATCH(y, at / args.width)", "VOX_WATCH(y, 0)"),
        ),
    },
    {
        "chunks counted from the batch's first row": (
            "example_products/3+0+130/17x129",
            ("r < end; r += (int32_t)kChunk) {", "r < end; r = (r / 128 + 1) * 128) {"),
            (
                "end - r < (int32_t)kChunk ? end - r : (int32_t)kChunk;",
                "(end - r < 128 - r % 128 ? end - r : 128 - r % 128);",
            ),
        ),
        "a chunk of squares backwards": (
            "sum_of_squares/3x43",
            ("pieces[local * (kPiece + 1) + k], p)", "pieces[local * (kPiece + 1) + kPiece - 1 - k], p)"),
        ),
        "a masked pair with weight zero": (
            "attention_backward/3/1x256/1/None",
            ("if (j >= spans.low[i] && j < spans.high[i]) p.v[i]", "p.v[i]"),
        ),
    },
    {
        "the window one short": (
            "attention_backward/2/1x136/64/None",
            ("window < length - key ? key + window - 1", "window < length - key ? key + window - 2"),
        ),
        "a product rounded before its sum": (
            "linear_backward/f32/17x129x3",
            (
                "p.v[t] = f_fma(left[n * kTall + t], w, p.v[t]);",
                "p.v[t] = f_add(f_mul(left[n * kTall + t], w), p.v[t]);",
            ),
        ),
    },
)
"""Groups of mistakes that do not meet, compiled together: a case, texts and what is put in their place."""


@pytest.mark.parametrize("group", range(len(MISTAKES)))
def test_mistakes_show(lane, expected, group):
    replacements = [pair for _, *pairs in MISTAKES[group].values() for pair in pairs]
    ops = lane("metal", changed("metal", *replacements))
    missed = [what for what, (name, *_) in MISTAKES[group].items() if not caught(name, ops, expected)]
    assert not missed


def test_contraction_shows_in_training(lane, expected):
    """Where training has a product and a sum side by side that are not to be one."""
    source = changed(
        "metal",
        ("#pragma METAL fp contract(off)", ""),
    )
    ops = lane("metal", source, optimise="-O2")
    for name in ("adamw/3x127", "scaled/3x127"):
        assert caught(name, ops, expected), name


def test_one_text_for_training_alone():
    """A lane may compile it beside the kernels that serve, which then need not be compiled twice."""
    from mens_core.kernel_source import grid_source

    names = {
        kernels: set(re.findall(r"\bVOX_KERNEL\((vox_[a-z_]+)\)", grid_source("cuda", kernels)))
        for kernels in ("all", "serving", "training")
    }
    assert names["all"] == names["serving"] | names["training"]
    assert "vox_adamw" in names["training"] - names["serving"]
    assert "vox_argmax" in names["serving"] - names["training"]
