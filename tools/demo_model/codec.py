"""Training of the autoencoder. Knows: its losses and its step. Doesn't know: words."""

from __future__ import annotations

import torch
from tools.demo_model.model import SAMPLES_PER_LATENT, Autoencoder
from torch import Tensor

WINDOWS = (128, 512, 2048, 4096)  # samples of the STFT windows; the hop is a quarter


def spectral_loss(got: Tensor, want: Tensor) -> Tensor:
    """got, want [N, S] float32 → scalar: log magnitude and spectral convergence, averaged."""
    total = got.new_zeros(())
    for size in WINDOWS:
        window = torch.hann_window(size, device=got.device)
        scale = 2 / window.sum()

        def stft(x: Tensor, size: int = size, window: Tensor = window) -> Tensor:
            return torch.stft(x, size, size // 4, window=window, return_complex=True)

        g, w = stft(got) * scale, stft(want) * scale
        ga = (g.real.square() + g.imag.square() + 1e-10).sqrt()
        wa = (w.real.square() + w.imag.square() + 1e-10).sqrt()
        logs = (torch.log(ga + 3e-4) - torch.log(wa + 3e-4)).abs().mean()
        ratio = (ga - wa).square().sum((1, 2)) / (wa.square().sum((1, 2)) + 1e-3)
        total = total + logs + (ratio + 1e-6).sqrt().clamp(max=4).mean()
    return total / len(WINDOWS)


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

    def draw(self) -> tuple[Tensor, Tensor]:
        """Audio [B, 2, S] float32 and the weight [B] of its waveform loss."""
        device = self.pool.device
        audio, tonal = self._take()
        other = audio.roll(1, 0) * torch.rand(self.batch, 1, 1, device=device)
        mixed = (torch.rand(self.batch, 1, 1, device=device) < 0.15).float()
        audio = audio + mixed * other
        gain = 10 ** (torch.rand(self.batch, 1, 1, device=device) * 0.6 - 0.4)
        swap = torch.rand(self.batch, 1, 1, device=device) < 0.2
        audio = torch.where(swap, audio.flip(1), audio) * gain
        return audio / audio.abs().amax((1, 2), keepdim=True).clamp(min=0.99), tonal


def codec_loss(
    codec: Autoencoder, audio: Tensor, tonal: Tensor, share: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Total and its parts: waveform, spectra (weighted by share, a scalar on the device).

    The bottleneck is normalised by the batch; `standardise` replaces that afterwards.
    """
    with torch.autocast(audio.device.type, torch.bfloat16, enabled=audio.is_cuda):
        latents = batch_normal(codec.encode(audio))
        level = torch.rand(len(audio), 1, 1, device=audio.device) * 0.12
        noisy = latents + level * torch.randn_like(latents)
        got = codec.decode(noisy)
    got = got.float()
    scale = audio.square().mean((1, 2)).sqrt() + 0.01
    wave = ((got - audio).abs().mean((1, 2)) / scale * tonal).mean()
    pick = torch.rand(len(audio), 1, device=audio.device)  # left, right or the middle of each

    def channel(x: Tensor) -> Tensor:
        return torch.where(pick < 0.4, x.mean(1), torch.where(pick < 0.7, x[:, 0], x[:, 1]))

    spectra = spectral_loss(channel(got), channel(audio))
    return wave * 2 + spectra * share, [wave, spectra]


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
def codec_report(codec: Autoencoder, audio: Tensor, kinds: list[str]) -> dict[str, list[float]]:
    """SI-SDR in dB and log-spectral distance in dB for each kind of sound, means."""
    got = torch.cat([codec.decode(codec.encode(part.float())) for part in audio.split(64)])
    want = audio.float()
    g, w = got.flatten(1), want.flatten(1)
    scale = (g * w).sum(1) / w.square().sum(1).clamp(min=1e-8)
    target = scale[:, None] * w
    sdr = 10 * torch.log10(target.square().sum(1) / (g - target).square().sum(1).clamp(min=1e-8))
    window = torch.hann_window(2048, device=audio.device)

    def level(x: Tensor) -> Tensor:
        magnitude = torch.stft(x.mean(1), 2048, 512, window=window, return_complex=True).abs()
        return 20 * torch.log10(magnitude * 2 / window.sum() + 1e-4)

    distance = (level(got) - level(want)).square().mean(1).sqrt().mean(1)
    names = sorted(set(kinds))
    rows = {n: [i for i, k in enumerate(kinds) if k == n] for n in names}
    return {n: [round(v[i].mean().item(), 2) for v in (sdr, distance)] for n, i in rows.items()}


def latent_pool(codec: Autoencoder, audio: Tensor) -> Tensor:
    """Audio [N, 2, S] float16 → latents [N, C, L] float16."""
    with torch.no_grad(), torch.autocast(audio.device.type, torch.bfloat16, enabled=False):
        return torch.cat([codec.encode(part.float()).half() for part in audio.split(64)])


__all__ = ["Crops", "codec_loss", "codec_report", "latent_pool", "standardise", "wake"]
