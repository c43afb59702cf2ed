"""sentencepiece_merges: what is left out never mattered."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from vox_host.models.sentencepiece_merges import sentencepiece_merges

LETTERS = "ab"


def every_merge(priorities):
    """All pairs of pieces that make a piece: the list that converters of SentencePiece write."""
    merges = []
    for piece, (cost, i) in priorities.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in priorities and right in priorities:
                merges.append((cost, -len(left), -len(right), i, (left, right)))
    return [pair for *_, pair in sorted(merges)]


def a_tokenizer(priorities, merges):
    vocabulary = {piece: i for i, piece in enumerate(priorities)}
    return Tokenizer(models.BPE(vocab=vocabulary, merges=merges))


def pairs(merges):
    return [tuple(text.split(" ")) for text in merges]


pieces = st.lists(
    st.tuples(st.text(LETTERS, min_size=2, max_size=6), st.integers(0, 2)),
    max_size=25,
    unique_by=lambda piece: piece[0],
)


@settings(max_examples=400, deadline=None)
@given(pieces, st.lists(st.text(LETTERS, min_size=1, max_size=40), min_size=1, max_size=5))
def test_the_merges_that_can_fire_tokenise_as_all_of_them_do(some_pieces, texts):
    # Few scores, so that many pieces tie: there the order of ids decides.
    scored = [*some_pieces, *((letter, 0) for letter in LETTERS)]
    priorities = {piece: (float(-score), i) for i, (piece, score) in enumerate(scored)}
    everything = every_merge(priorities)
    kept = pairs(sentencepiece_merges(priorities))
    assert [pair for pair in everything if pair in set(kept)] == kept
    full, lean = a_tokenizer(priorities, everything), a_tokenizer(priorities, kept)
    for text in [*texts, *priorities]:
        assert lean.encode(text).ids == full.encode(text).ids


def test_a_piece_keeps_one_merge_at_most():
    priorities = {"a": (9.0, 0), "aa": (1.0, 1), "aaa": (2.0, 2), "aaaa": (3.0, 3)}
    assert sentencepiece_merges(priorities) == ["a a", "aa a", "aa aa"]


def test_of_two_merges_of_one_score_the_longer_left_part_comes_first():
    priorities = {
        "a": (9.0, 0),
        "b": (9.0, 1),
        "ba": (1.0, 2),
        "aba": (2.0, 3),
        "bab": (2.0, 4),
        "abab": (3.0, 5),
    }
    assert sentencepiece_merges(priorities) == ["b a", "ba b", "a ba", "a bab"]


def test_a_piece_that_merging_never_reaches_keeps_none():
    priorities = {"a": (9.0, 0), "b": (9.0, 1), "abb": (1.0, 2), "aéb": (1.0, 3)}
    assert sentencepiece_merges(priorities) == []
