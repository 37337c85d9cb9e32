"""Make docs/gallery.md and its pictures with the project's own command line.

Knows: one prompt of each family. Doesn't know: models, torch.
`python -m tools.demo_model.gallery` from the project's folder; takes a minute.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
WIDTHS = (900, 760, 640, 560)  # pixels, the first that is small enough
MOST = 60_000  # bytes of a picture

# file name, prompt, further options, what to look at
PICTURES = (
    ("tone", "A4 sine tone", "--seconds 2", "One line at 440 Hz."),
    (
        "organ",
        "C4 organ note",
        "--seconds 2",
        "The note and its second, fourth and eighth partial.",
    ),
    ("chord", "C major pad", "--seconds 3", "Three notes that swell, with soft partials."),
    ("arpeggio", "rising arpeggio in A minor", "--seconds 3", "Four notes up, again and again."),
    ("pluck", "E4 guitar pluck", "--seconds 2", "High partials die first."),
    ("bell", "A5 bell", "--seconds 2", "Partials that are no multiples of the first."),
    ("kick", "kick drum", "--seconds 1", "A fast fall to 50 Hz."),
    ("snare", "snare drum", "--seconds 1", "A body below 250 Hz and a burst of noise."),
    ("hat", "closed hi-hat", "--seconds 1", "Noise above 7 kHz, gone at once."),
    ("clap", "clap", "--seconds 1", "Noise around 1.5 kHz in three bursts."),
    ("beat", "120 bpm drum beat", "--seconds 4", "Kick and snare every half second, hats between."),
    ("lofi", "lofi house loop", "--seconds 4", "Kick, hats, a chord and hiss."),
    ("rain", "rain", "--seconds 3", "Noise with drops."),
    ("wind", "wind blowing", "--seconds 4", "Low noise that comes and goes."),
    ("sweep", "rising sweep", "--seconds 3", "A line from 200 to 1,600 Hz, in steps of a frame."),
    ("siren", "siren wailing", "--seconds 4", "Up and down every two seconds."),
    ("house", "fast house beat", "--seconds 3", "160 beats a minute: kick, clap, hats between."),
    ("short", "short C5 flute note", "--seconds 2", "A third of a second."),
)

HEAD = """# What the demo model makes

One picture per family of prompts: frequency upwards, time to the right, the waveform below; above
each the command that made it (here at a smaller size). The renders are repeatable. How often the
model does what the prompt says, and where it fails, is in [its card](../models/demo/README.md).
""".splitlines()


def shrink(source: Path, target: Path) -> None:
    """A smaller copy with few colours."""
    with Image.open(source) as image:
        picture = image.convert("RGB")
    for width in WIDTHS:
        small = picture.copy()
        small.thumbnail((width, width), Image.Resampling.LANCZOS)
        small.quantize(40, dither=Image.Dither.NONE).save(target, optimize=True)
        if target.stat().st_size <= MOST:
            return
    raise SystemExit(f"{target} is {target.stat().st_size:,} bytes, more than {MOST:,}")


def main() -> None:
    """Render everything and write the page."""
    folder = ROOT / "docs" / "gallery"
    folder.mkdir(exist_ok=True)
    page = [*HEAD, ""]
    with tempfile.TemporaryDirectory() as temporary:
        for name, prompt, options, words in PICTURES:
            wav = Path(temporary) / f"{name}.wav"
            command = [prompt, *options.split(), "--seed", "1", "--spectrogram"]
            subprocess.run(
                [ROOT / "sa3", *command, "-m", "demo", "--device", "cpu", "-q", "-o", wav],
                check=True,
            )
            shrink(wav.with_suffix(".png"), folder / f"{name}.png")
            page += [
                f"## {prompt}",
                "",
                f'`./sa3 "{prompt}" {options} --seed 1 --spectrogram`',
                "",
                f"![Spectrogram of {prompt}](gallery/{name}.png)",
                "",
                words,
                "",
            ]
    (ROOT / "docs" / "gallery.md").write_text("\n".join(page).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
