"""The plot: well formed, everything inside it, the same bytes for the same points."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from vox_host.training.plot import loss_svg

SVG = "{http://www.w3.org/2000/svg}"
LOSS = st.floats(min_value=0, max_value=1e30, allow_nan=False)
POINTS = st.lists(LOSS, max_size=40).map(lambda losses: list(enumerate(losses, start=1)))


@given(train=POINTS, held_out=POINTS)
def test_every_point_lies_inside(train, held_out):
    picture = ElementTree.fromstring(loss_svg(train, held_out, title="a <b> & c", best_step=3))
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    for line in picture.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width and 0 <= y <= height
    assert "a <b> & c" in [text.text for text in picture.iter(f"{SVG}text")]


def test_a_lower_loss_is_lower_and_the_best_is_ringed():
    drawn = loss_svg([(1, 4.0), (2, 1.0)], [(0, 5.0), (2, 2.0)], title="t", best_step=2)
    picture = ElementTree.fromstring(drawn)
    train, held_out = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in picture.iter(f"{SVG}polyline")
    ]
    assert train[0][1] < train[1][1], "down is more in an SVG"
    ringed = [c for c in picture.iter(f"{SVG}circle") if c.attrib["r"] == "6"]
    assert [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in ringed] == [held_out[1]]
    assert drawn == loss_svg([(1, 4.0), (2, 1.0)], [(0, 5.0), (2, 2.0)], title="t", best_step=2)


def test_a_long_run_is_thinned_to_means_and_keeps_its_end():
    points = [(step, float(step % 2)) for step in range(1, 100_001)]
    picture = ElementTree.fromstring(loss_svg(points, [], title="t", best_step=None))
    (line,) = picture.iter(f"{SVG}polyline")
    assert 500 <= len(line.attrib["points"].split()) <= 600
    assert line.attrib["points"].split()[-1].startswith("700.0,")


def test_a_run_without_a_step_says_so():
    assert "no step was taken yet" in loss_svg([], [], title="t", best_step=None)
