"""The strip of moving pictures at README's top, and how benchmarks/make_strip.py puts one together."""

import sys

import numpy as np
from conftest import ROOT
from PIL import Image

sys.path.insert(0, str(ROOT / "benchmarks"))
import make_strip


def test_the_strip_is_small_and_moves():
    path = ROOT / "benchmarks" / "strip.webp"
    assert path.stat().st_size <= 1_500_000
    with Image.open(path) as strip:
        assert strip.n_frames >= 48
        pictures = []
        for t in (0, strip.n_frames // 2):
            strip.seek(t)
            pictures.append(np.asarray(strip.convert("RGB"), dtype=np.int16))
    # Each quarter's own panel shows something else half of the film later.
    first, later = (np.array_split(picture, 4, axis=1) for picture in pictures)
    assert all(np.abs(first[i] - later[i]).max() > 50 for i in range(4))


def test_films_stand_side_by_side_at_one_height_and_a_short_one_is_repeated():
    red, green, blue = (
        np.full((20, 10, 3), color, dtype=np.uint8) for color in ([255, 0, 0], [0, 255, 0], [0, 0, 255])
    )
    wide = np.repeat(blue, 4, axis=1)
    joined = [np.asarray(picture) for picture in make_strip.strip([[red, green], [wide, wide, wide]], 10)]
    # 10 x 20 becomes 5 x 10, 40 x 20 becomes 20 x 10.
    assert [picture.shape for picture in joined] == [(10, 25, 3)] * 3
    assert [picture[5, 2].tolist() for picture in joined] == [[255, 0, 0], [0, 255, 0], [255, 0, 0]]
    assert all((picture[:, 5:] == [0, 0, 255]).all() for picture in joined)


def test_every_panel_has_its_agent():
    for name in make_strip.PANELS:
        assert (ROOT / "benchmarks" / "agents" / f"{name}.pt").exists()
