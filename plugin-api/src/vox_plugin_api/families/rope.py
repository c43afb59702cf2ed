"""Rotary settings of a config.json, in each of the spellings that checkpoints use.

`rope_scaling` with `rope_theta` beside it is the old spelling, `rope_parameters` the new one
(for Gemma 3 one object per kind of layer). A type that is not known, or two keys that
disagree, is a problem: the wrong rotary table answers fluently and wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from vox_plugin_api.families.fields import REQUIRED, Fields

__all__ = ["Rope", "Yarn", "parse_global_rope", "parse_local_rope"]

_YARN_KEYS = {
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
}
_KEYS = {"rope_type", "type", "rope_theta", "factor", *_YARN_KEYS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3), as checkpoints parametrise it."""

    factor: Fraction
    original_context: int
    beta_fast: Fraction = Fraction(32)
    beta_slow: Fraction = Fraction(1)
    truncate: bool = True
    attention_factor: Fraction | None = None
    """Given outright, or None: derived from `factor` and the two scales below."""
    mscale: Fraction | None = None
    mscale_all_dim: Fraction | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One rotary embedding: base, width, and how positions are scaled."""

    theta: Fraction
    head_dim: int
    scaling: Fraction | Yarn | None = None
    """A plain factor is linear scaling: every frequency is divided by it."""


def parse_global_rope(
    config: Fields, head_dim: int, context_length: int, default_theta: Fraction | None
) -> Rope:
    """The rotary embedding of full-attention layers; `default_theta` None: it must be given."""
    old = config.child("rope_scaling")
    new = _per_kind(config, "full_attention")
    if old and new and not _agree(old, new):
        config.problem("rope_scaling", "the same as rope_parameters, or only one of them")
    settings = new or old
    theta = _theta(config, "rope_theta", settings, REQUIRED if default_theta is None else default_theta)
    scaling = None if settings is None else _parse_scaling(settings, context_length)
    return Rope(theta=theta, head_dim=head_dim, scaling=scaling)


def parse_local_rope(config: Fields, head_dim: int, default_theta: Fraction) -> Rope:
    """The rotary embedding of Gemma 3's sliding layers: a theta of its own, never scaled."""
    settings = _per_kind(config, "sliding_attention", only_per_kind=True)
    theta = _theta(config, "rope_local_base_freq", settings, default_theta)
    if settings is not None and _rope_type(settings) not in (None, "default"):
        settings.problem(settings.first_of("rope_type", "type"), "'default': sliding layers are not scaled")
    return Rope(theta=theta, head_dim=head_dim)


def _per_kind(config: Fields, kind: str, *, only_per_kind: bool = False) -> Fields | None:
    settings = config.child("rope_parameters")
    if settings is None:
        return None
    if {"full_attention", "sliding_attention"} & set(settings.data):
        return settings.child(kind)
    return None if only_per_kind else settings


def _agree(a: Fields, b: Fields) -> bool:
    keys = (set(a.data) | set(b.data)) - {"type", "rope_type", "rope_theta"}
    return all(a.data.get(k) == b.data.get(k) for k in keys) and _rope_type(a) == _rope_type(b)


def _theta(config: Fields, key: str, settings: Fields | None, default: Fraction | object) -> Fraction:
    is_inside = settings is not None and settings.has("rope_theta")
    if settings is not None and is_inside:
        inside = settings.number("rope_theta", above=Fraction(1))
        if config.has(key) and config.number(key, above=Fraction(1)) != inside:
            config.problem(key, f"the same as {settings.path}rope_theta ({float(inside):g})")
        return inside
    if isinstance(default, Fraction):
        return config.number(key, default, above=Fraction(1))
    return config.number(key, above=Fraction(1))


def _rope_type(settings: Fields) -> str | None:
    new, old = settings.text("rope_type"), settings.text("type")
    if new is not None and old is not None and new != old:
        settings.problem("rope_type", f"the same as type ({old!r})")
    return new if new is not None else old


def _parse_scaling(settings: Fields, context_length: int) -> Fraction | Yarn | None:
    rope_type = _rope_type(settings)
    for key in sorted(set(settings.data) - _KEYS):
        settings.note(f"{settings.path}{key} is not used")
    match rope_type:
        case None:
            if set(settings.data) <= {"rope_theta"}:
                return None
            settings.problem("rope_type", "'default', 'linear' or 'yarn'")
            return None
        case "default":
            return None
        case "linear":
            factor = _factor(settings)
            return factor if factor != 1 else None
        case "yarn":
            return _parse_yarn(settings, context_length)
        case _:
            settings.problem(settings.first_of("rope_type", "type"), "'default', 'linear' or 'yarn'")
            return None


def _parse_yarn(settings: Fields, context_length: int) -> Yarn:
    if not settings.has("original_max_position_embeddings"):
        settings.note(
            f"{settings.path}original_max_position_embeddings is missing; "
            f"max_position_embeddings ({context_length}) was taken for it"
        )

    def optional(key: str, below: Fraction = Fraction(2**64)) -> Fraction | None:
        return settings.number(key, below=below) if settings.has(key) else None

    return Yarn(
        factor=_factor(settings),
        original_context=settings.integer("original_max_position_embeddings", context_length),
        beta_fast=settings.number("beta_fast", Fraction(32)),
        beta_slow=settings.number("beta_slow", Fraction(1)),
        truncate=settings.boolean("truncate", True),
        attention_factor=optional("attention_factor", below=Fraction(8)),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
    )


def _factor(settings: Fields) -> Fraction:
    factor = settings.number("factor", below=Fraction(2**20))
    if 0 < factor < 1:
        settings.problem("factor", "a number of at least 1")
        return Fraction(1)
    return factor
