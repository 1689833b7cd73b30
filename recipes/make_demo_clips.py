"""Where do sample files for a first run come from? Moving shapes over gradients, drawn here, written as real files.

python recipes/make_demo_clips.py --output_dir demo-clips
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

FPS = 16
# (frames, height, width) of the buckets that the files are meant for, and how many files each gets: uneven on purpose.
SAMPLES = {
    (1, 96, 96): 9,
    (1, 96, 160): 11,
    (1, 160, 96): 5,
    (9, 96, 160): 8,
    (17, 96, 96): 6,
    (17, 96, 160): 10,
    (33, 96, 160): 13,
}
COLORS = {
    "red": (214, 40, 40),
    "pink": (240, 120, 170),
    "yellow": (252, 211, 30),
    "green": (56, 160, 80),
    "blue": (40, 90, 214),
    "purple": (128, 60, 170),
    "black": (20, 20, 24),
    "white": (240, 240, 240),
}
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
SIDES = {"circle": 0, "square": 4, "triangle": 3, "hexagon": 6}


def draw_scene(random: np.random.Generator, frames: int, height: int, width: int):
    """Draws one scene.

    Args:
        random: decides everything about it.
        frames, height, width: of the scene, in frames and pixels.

    Returns:
        A list of `frames` RGB pictures, and the caption that says what is in them.
    """
    top, bottom, *colors = random.permutation(list(COLORS))[: 2 + random.integers(1, 4)]
    ramp = np.linspace(0, 1, height)[:, None, None]
    gradient = (1 - ramp) * np.array(COLORS[top]) + ramp * np.array(COLORS[bottom])
    background = Image.fromarray(np.broadcast_to(gradient, (height, width, 3)).astype(np.uint8))
    things = [
        {
            "color": str(color),
            "shape": str(random.choice(list(SIDES))),
            "direction": str(random.choice(list(DIRECTIONS))),
            "center": random.uniform(0.25, 0.75, 2) * (width, height),
            "radius": random.uniform(0.12, 0.25) * min(height, width),
            "speed": random.uniform(0.01, 0.02) * min(height, width),
        }
        for color in colors
    ]
    pictures = []
    for frame in range(frames):
        picture = background.copy()
        draw = ImageDraw.Draw(picture)
        for thing in things:
            x, y = thing["center"] + frame * thing["speed"] * np.array(DIRECTIONS[thing["direction"]])
            draw_shape(draw, thing["shape"], (x, y, thing["radius"]), COLORS[thing["color"]])
        pictures.append(picture)
    moves = [f" moving {thing['direction']}" if frames > 1 else "" for thing in things]
    names = [f"a {thing['color']} {thing['shape']}{move}" for thing, move in zip(things, moves)]
    return pictures, f"{' and '.join(names)}, on a background that goes from {top} to {bottom}"


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, circle: tuple, color: tuple):
    if SIDES[shape]:
        draw.regular_polygon(circle, SIDES[shape], fill=color)
    else:
        draw.circle(circle[:2], circle[2], fill=color)


def write_clip(path: Path, pictures: list):
    """Writes RGB pictures of one even size as an H.264 clip of 16 frames a second."""
    import av  # here, so that scenes can be drawn where there is no PyAV

    # With mbtree x264 encodes clips as narrow as these differently from run to run (seen with its AVX-512 code).
    options = {"x264-params": "mbtree=0"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = *pictures[0].size, "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_image(picture)))
        container.mux(stream.encode())


def make_demo_clips(folder, seed: int = 0) -> list[Path]:
    """Writes the samples and their `metadata.jsonl`; the same seed writes the same files.

    Each file is 32 pixels larger than its bucket each way and up to 3 frames longer, so that there is something to
    resize, to crop and to trim.

    Args:
        folder: where to; made if it is not there.
        seed: of the scenes.

    Returns:
        The paths of the media files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    paths, rows = [], []
    for (frames, height, width), count in SAMPLES.items():
        for number in range(count):
            length = frames + int(random.integers(0, 4)) if frames > 1 else 1
            pictures, caption = draw_scene(random, length, height + 32, width + 32)
            suffix = ".mp4" if frames > 1 else (".png", ".jpg")[number % 2]
            path = folder / f"scene_{len(paths):03d}{suffix}"
            if frames > 1:
                write_clip(path, pictures)
            else:
                pictures[0].save(path, quality=95)
            paths.append(path)
            rows.append(json.dumps({"file_name": path.name, "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the new samples")
    parser.add_argument("--seed", type=int, default=0, help="of the scenes")
    args = parser.parse_args()
    paths = make_demo_clips(args.output_dir, args.seed)
    buckets = " ".join("x".join(map(str, shape)) for shape in SAMPLES)
    print(f"wrote {len(paths)} files and metadata.jsonl to {args.output_dir}")
    print(f"their buckets: --fps {FPS} --video_resolution_buckets {buckets}")


if __name__ == "__main__":
    main()
