"""Panels cut from larger figures: the front page, and one for each card of the gallery.

Run as a script, it cuts the pictures of the front page from a run of the demonstration: `make pictures`.
"""

import sys
from pathlib import Path

from PIL import Image

CARDS = {  # panel of the figure of a tutorial: left, top, right and bottom in parts of its size
    "bayesian_neural_network": (0.66, 0.0, 1.0, 1.0),
    "bayesian_sparse_gp": (0.685, 0.06, 0.995, 0.88),
    "bird_counts": (0.19, 0.1, 0.315, 0.92),
    "deep_kernel": (0.655, 0.17, 0.935, 0.88),
    "demo": (0.062, 0.085, 0.277, 0.87),
    "k_neighbors": (0.0, 0.0, 0.51, 1.0),
    "leave_one_out": (0.055, 0.07, 0.467, 0.885),
    "model_comparison": (0.0, 0.0, 0.525, 1.0),
    "raster_map": (0.062, 0.01, 0.395, 0.905),
    "reading_diagnostics": (0.255, 0.0, 0.5, 1.0),
    "scikit_learn": (0.392, 0.19, 0.601, 0.78),
    "spatial_counts": (0.51, 0.06, 0.71, 0.86),
    "species_together": (0.085, 0.03, 0.43, 0.452),
    "ten_million": (0.77, 0.1, 1.0, 1.0),
    "varying_coefficients": (0.075, 0.095, 0.437, 0.85),
    "vnngp_terrain": (0.04, 0.065, 0.238, 0.88),
}
FRONT = {"data": 63, "mean": 591, "sd": 1118}  # left edges of the maps in the first figure of the demonstration
SIZE, BOTTOM = (366, 288), 438


def save_card(picture: Image.Image, name: str, folder: Path) -> None:
    """Save the panel of a tutorial's figure; the whole figure if it has one panel only."""
    left, top, right, bottom = CARDS.get(name, (0.0, 0.0, 1.0, 1.0))
    width, height = picture.size
    card = picture.crop((int(left * width), int(top * height), int(right * width), int(bottom * height)))
    card.thumbnail((480, 400))
    save_small(card, folder / f"{name}.png")


def save_small(picture: Image.Image, path: Path) -> None:
    """Save with a palette, which takes a third of the bytes."""
    picture.convert("RGB").quantize(96, dither=0).save(path, optimize=True)


if __name__ == "__main__":
    demo, static = Path(sys.argv[1]), Path(__file__).with_name("_static")
    figure = Image.open(demo / "map.png").convert("RGB")
    save_small(figure, static / "terrain.png")
    save_small(Image.open(demo / "calibration.png"), static / "calibration.png")
    for name, left in FRONT.items():
        save_small(figure.crop((left, BOTTOM - SIZE[1], left + SIZE[0], BOTTOM)), static / f"terrain_{name}.png")
