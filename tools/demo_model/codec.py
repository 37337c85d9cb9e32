"""Training of the autoencoder. Knows: its losses and its step. Doesn't know: words."""

from __future__ import annotations

import torch
from tools.demo_model.model import SAMPLES_PER_LATENT, Autoencoder
from torch import Tensor

WINDOWS = (128, 512, 2048, 4096)  # samples of the STFT windows; the hop is a quarter


def apart(got: Tensor, want: Tensor) -> Tensor:
    """Distance of got from want [B, 2, ...] over the channels: [B, ...], root of a sum of squares.

    The sum of |left| and |right| would be the same for every mono answer to a sound in one
    channel, from silence to full level, so that a codec unsure of the side learns to be silent.
    To this distance left and right are the same as middle and side.
    """
    return ((got - want).square().sum(1) + 1e-10).sqrt()


def middle_side(x: Tensor) -> Tensor:
    """Left and right [B, 2, S] → middle and side, with the same energy; its own inverse."""
    return torch.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], 1) * 0.5**0.5


def spectral_loss(got: Tensor, want: Tensor) -> Tensor:
    """got, want [B, 2, S] float32 → scalar: log magnitude and spectral convergence, averaged.

    What lies 40 dB below the other channel at its place does not count.
    """
    total = got.new_zeros(())
    for size in WINDOWS:
        window = torch.hann_window(size, device=got.device)
        scale = (2 / window.sum()).square()

        def magnitude(
            x: Tensor, size: int = size, window: Tensor = window, scale: Tensor = scale
        ) -> Tensor:
            bins = torch.stft(x.flatten(0, 1), size, size // 4, window=window, return_complex=True)
            power = bins.real.square() + bins.imag.square()
            return (power * scale + 1e-10).sqrt().unflatten(0, (-1, 2))

        g, w = magnitude(got), magnitude(want)
        floor = 3e-4 + 0.01 * w.sum(1, keepdim=True)
        logs = apart(torch.log(g + floor), torch.log(w + floor)).mean() * 0.5**0.5
        ratio = (g - w).square().sum((1, 2, 3)) / (w.square().sum((1, 2, 3)) + 1e-3)
        total = total + logs + (ratio + 1e-6).sqrt().clamp(max=4).mean()
    return total / len(WINDOWS)


def side_loss(got: Tensor, want: Tensor, block: int = 2048) -> Tensor:
    """got, want [B, 2, S] → scalar: error of the levels of both channels, block by block.

    In units of 10 dB, over blocks of `block` samples; what is 30 dB below the other channel or
    70 dB below full scale counts as nothing.
    """
    g, w = (x.unflatten(2, (-1, block)).square().mean(3) for x in (got, want))
    floor = 1e-7 + 1e-3 * w.sum(1, keepdim=True)
    return apart(torch.log10(g + floor), torch.log10(w + floor)).mean()


def batch_normal(latents: Tensor) -> Tensor:
    """Latents [B, C, L] with mean 0, deviation 1 in each channel of this batch, float32."""
    latents = latents.float()
    mean = latents.mean(dim=(0, 2), keepdim=True)
    return (latents - mean) / (latents.var(dim=(0, 2), keepdim=True) + 1e-8).sqrt()


@torch.no_grad()
def wake(codec: Autoencoder, gamma: float, gain: float) -> None:
    """An initialisation under which sound gets through a fresh codec.

    The inserted tokens are all the same, and only rotary attention tells the 16 places of a
    latent apart; two equal attention maps cancel. So: large queries and keys, `gamma` larger
    still where the rotation is fast enough to differ inside a group, and feed-forward layers
    with `gain`, whose gates then multiply place by content from the start.
    """
    stages = (codec.encoder.layers["0"], codec.decoder.layers["3"])
    for stage in stages:
        torch.nn.init.normal_(stage.new_tokens, std=0.5)
        for block in stage.transformers:
            attention = block.self_attn
            dim, head = attention.to_out.weight.shape[0], attention.head_dim
            torch.nn.init.normal_(attention.to_qkv.weight, std=2 * dim**-0.5)
            torch.nn.init.normal_(attention.to_out.weight, std=dim**-0.5)
            quarter = head // 4
            fast = int((10_000.0 ** (-torch.arange(quarter) / quarter) > 0.08).sum())
            for norm in (attention.q_norm, attention.k_norm):
                norm.alpha.fill_(1.0)
                norm.gamma.fill_(3.0)
                norm.gamma[:fast] *= gamma
                norm.gamma[quarter : quarter + fast] *= gamma
            block.ff.ff[0].proj.weight.mul_(gain)
    codec.decoder.layers["1"].weight.mul_(2.0)
    stages[0].mapping.weight_g.mul_(8.0)  # sound is small beside the inserted tokens
    stages[1].mapping.weight_g.mul_(0.2)


class Crops:
    """Random pieces of a pool of clips: all on the device, no host in the loop."""

    def __init__(self, pool: Tensor, seconds: Tensor, tonal: Tensor, batch: int, latents: int):
        """Pool [N, 2, S] float16; seconds [N] float32; tonal [N]: weight of the waveform loss."""
        self.pool, self.tonal, self.batch = pool, tonal, batch
        self.samples = latents * SAMPLES_PER_LATENT
        self.room = (seconds * 44_100 - self.samples // 4).clamp(min=1, max=pool.shape[2]
                                                                 - self.samples)  # fmt: skip
        self.ramp = torch.arange(self.samples, device=pool.device)

    def _take(self) -> tuple[Tensor, Tensor]:
        device = self.pool.device
        clip = torch.randint(len(self.pool), (self.batch,), device=device)
        chance = torch.rand(self.batch, device=device)
        start = ((chance - 0.3).clamp(min=0) / 0.7 * self.room[clip]).long()
        start = start // SAMPLES_PER_LATENT * SAMPLES_PER_LATENT  # the sounds' own grid
        row = clip[:, None, None] * 2 + torch.arange(2, device=device)[None, :, None]
        where = row * self.pool.shape[2] + (start[:, None] + self.ramp)[:, None]
        return self.pool.view(-1)[where].float(), self.tonal[clip]

    def _place(self, audio: Tensor) -> Tensor:
        """Half of the crops to one side: a quarter by 26 dB, as the words do, a quarter by any.

        A fifth is wide, as the word is: right becomes left, a quarter of a cycle earlier.
        """
        shape, device = (self.batch, 1), self.pool.device
        kind, depth = torch.rand(shape, device=device), torch.rand(shape, device=device) * 40
        depth = torch.where(kind < 0.25, torch.full_like(depth, 26), depth) * (kind < 0.5)
        earlier = torch.fft.irfft(torch.fft.rfft(audio[:, 0]) * 1j, n=self.samples)
        wide = torch.stack([audio[:, 0], earlier], 1)
        audio = torch.where((kind > 0.8)[:, None], wide, audio)
        audio = audio * torch.stack([torch.ones_like(depth), 10 ** (-depth / 20)], 1)
        swap = torch.rand(self.batch, 1, 1, device=device) < 0.5
        return torch.where(swap, audio.flip(1), audio)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Audio [B, 2, S] float32 and the weight [B] of its waveform loss."""
        device = self.pool.device
        audio, tonal = self._take()
        audio = self._place(audio)
        other = audio.roll(1, 0) * torch.rand(self.batch, 1, 1, device=device)
        mixed = (torch.rand(self.batch, 1, 1, device=device) < 0.15).float()
        audio = audio + mixed * other
        audio = audio * 10 ** (torch.rand(self.batch, 1, 1, device=device) * 0.6 - 0.4)
        return audio / audio.abs().amax((1, 2), keepdim=True).clamp(min=0.99), tonal


def codec_loss(
    codec: Autoencoder, audio: Tensor, tonal: Tensor, share: Tensor, side: float
) -> tuple[Tensor, list[Tensor]]:
    """Total and its parts: waveform, spectra, levels of the channels.

    share, a scalar on the device, is the weight of the spectra, side that of the levels.
    The bottleneck is normalised by the batch; `standardise` replaces that afterwards.
    """
    with torch.autocast(audio.device.type, torch.bfloat16, enabled=audio.is_cuda):
        latents = batch_normal(codec.encode(audio))
        level = torch.rand(len(audio), 1, 1, device=audio.device) * 0.12
        noisy = latents + level * torch.randn_like(latents)
        got = codec.decode(noisy)
    got = got.float()
    scale = (audio.square().mean((1, 2)) * 2).sqrt() + 0.01
    wave = (apart(got, audio).mean(1) / scale * tonal).mean()
    pick = torch.rand(len(audio), 1, 1, device=audio.device) < 0.5

    def pair(x: Tensor) -> Tensor:
        return torch.where(pick, x, middle_side(x))

    spectra = spectral_loss(pair(got), pair(audio))
    levels = side_loss(got, audio)
    return wave * 2 + spectra * share + levels * side, [wave, spectra, levels]


@torch.no_grad()
def standardise(codec: Autoencoder, audio: Tensor, *, fold: bool) -> None:
    """Make latents of audio [N, 2, S] mean 0, deviation 1 in each channel.

    With fold the decoder takes it back, so that decoding stays what it was; without, it replaces
    the normalisation by the batch that the decoder was trained with.
    """
    latents = torch.cat([codec.encode(part.float()) for part in audio.split(64)])
    mean = latents.mean((0, 2), keepdim=True)
    std = latents.std((0, 2)).clamp(min=1e-6)[None, :, None]
    norm, linear = codec.bottleneck, codec.decoder.layers["1"]
    norm.bias.data = (norm.bias - mean * norm.running_std) / std
    norm.scaling_factor.data = norm.scaling_factor / std
    if fold:
        linear.bias.data += linear.weight @ (mean[0, :, 0] * norm.running_std)
        linear.weight.data *= std[0, :, 0]


@torch.no_grad()
def round_trip(codec: Autoencoder, audio: Tensor) -> Tensor:
    """Audio [N, 2, S] of any precision, encoded and decoded in float32."""
    return torch.cat([codec.decode(codec.encode(part.float())) for part in audio.split(64)])


def side_db(audio: Tensor) -> Tensor:
    """Audio [N, 2, S] → [N]: left over right in dB, within ± 30."""
    level = audio.float().square().mean(2) + 1e-9
    return (10 * torch.log10(level[:, 0] / level[:, 1])).clamp(-30, 30)


@torch.no_grad()
def sides(codec: Autoencoder, audio: Tensor, pan: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Left over right in dB [N] of what comes back and of what went in: audio's middle, panned."""
    want = audio.float().mean(1, keepdim=True) * torch.tensor(pan, device=audio.device)[:, None]
    return side_db(round_trip(codec, want)), side_db(want)


def codec_report(codec: Autoencoder, audio: Tensor, kinds: list[str]) -> dict[str, list[float]]:
    """SI-SDR, log-spectral distance and error of the side for each kind of sound, means in dB.

    The side is that of the same sounds panned by 26 dB; `ALL` is every sound that is not silent.
    """
    got, want = round_trip(codec, audio), audio.float()
    g, w = got.flatten(1), want.flatten(1)
    scale = (g * w).sum(1) / w.square().sum(1).clamp(min=1e-8)
    target = scale[:, None] * w
    sdr = 10 * torch.log10(target.square().sum(1) / (g - target).square().sum(1).clamp(min=1e-8))
    window = torch.hann_window(2048, device=audio.device)

    def level(x: Tensor) -> Tensor:
        magnitude = torch.stft(x.mean(1), 2048, 512, window=window, return_complex=True).abs()
        return 20 * torch.log10(magnitude * 2 / window.sum() + 1e-4)

    distance = (level(got) - level(want)).square().mean(1).sqrt().mean(1)
    errors = [(found - true).abs() for found, true in
              (sides(codec, audio, pan) for pan in ((1.0, 0.05), (0.05, 1.0)))]  # fmt: skip
    side = (errors[0] + errors[1]) / 2
    rows = {n: [i for i, k in enumerate(kinds) if k == n] for n in sorted(set(kinds))}
    rows["ALL"] = [i for i, k in enumerate(kinds) if k != "silence"]
    values = (sdr.clamp(-30, 60), distance, side)
    return {n: [round(v[i].mean().item(), 2) for v in values] for n, i in rows.items()}


def latent_pool(codec: Autoencoder, audio: Tensor) -> Tensor:
    """Audio [N, 2, S] float16 → latents [N, C, L] float16."""
    with torch.no_grad(), torch.autocast(audio.device.type, torch.bfloat16, enabled=False):
        return torch.cat([codec.encode(part.float()).half() for part in audio.split(64)])


__all__ = [
    "Crops",
    "codec_loss",
    "codec_report",
    "latent_pool",
    "round_trip",
    "side_db",
    "standardise",
    "wake",
]
