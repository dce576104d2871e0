"""Norms in float32, norms of unit vectors, and norms with a factor and a shift behind them, before a map.

The unit is the norm's input. The target is this input alone: the map's input is built from it again. Stock keeps the
map's input, the norm's input (in float32 if it is cast), and what factors are multiplied with. A vector of
lengths is counted where vectors are short.
"""

import types

import torch
from program import Program
from torch import nn
from torch.nn import functional as F

WIDTH, CHANNELS, EMBEDDING = 256, 32, 64


class Before(nn.Module):
    """A map behind a norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm()
        self.proj = nn.Conv2d(CHANNELS, 8, 1) if hasattr(norm, "images") else nn.Linear(WIDTH, 64)

    def forward(self, x):
        return self.proj(self.norm(x))


class ClipNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor):
        orig_type = x.dtype
        ret = super().forward(x.type(torch.float32))
        return ret.type(orig_type)


class NormLikeInput(ClipNorm):
    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps).to(x)


class Fp32Norm(ClipNorm):
    def forward(self, input):
        w, b = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(input.to(torch.float32), (WIDTH,), w, b, self.eps).type_as(input)


class NoBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = torch.layer_norm(x.float(), (x.shape[-1],), self.gamma.float(), None, 1e-6)
        return y.to(dtype=x.dtype)


class GroupNorm32(nn.GroupNorm):
    images = True

    def __init__(self):
        super().__init__(8, CHANNELS)

    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Fp32GroupNorm(GroupNorm32):
    def forward(self, x):
        return F.group_norm(x.to(torch.float), self.num_groups, self.weight, self.bias, self.eps).to(x.dtype)


class Between(nn.Module):
    """The casts stand in the forward of the module around."""

    def __init__(self):
        super().__init__()
        self.ln, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x):
        h = self.ln(x.float()).to(x.dtype)
        return self.proj(h)


class FixedType(ClipNorm):
    def forward(self, x):
        return super().forward(x.float()).to(torch.bfloat16)


class Doubled(ClipNorm):
    def forward(self, x):
        return super().forward(x.float() * 2.0).type_as(x)


class Rounded(ClipNorm):
    def forward(self, x):
        return super().forward(x.float()).half().type_as(x)


class UnitNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.g = WIDTH**0.5, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class UnitNormRoot(UnitNorm):
    def forward(self, x):
        return self.g * nn.functional.normalize(x, p=2, dim=2, eps=1e-6) * x.shape[-1] ** 0.5


class UnitNormShifted(UnitNorm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.bias + F.normalize(x, dim=-1) * (self.g + 1)


class UnitNormImages(nn.Module):
    images = True

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, CHANNELS, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.g * (x.shape[1] ** 0.5)


class InnerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.gamma = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        normed = self.ln(x)
        return normed * (self.gamma + 1)


class HeadNorm(nn.Module):
    """Of queries or keys: (batch, heads, tokens, width)."""

    def __init__(self):
        super().__init__()
        self.gamma, self.proj = nn.Parameter(torch.ones(4, 1, WIDTH)), nn.Linear(WIDTH, 64)

    def forward(self, x):
        return self.proj(F.normalize(x, dim=-1) * self.gamma)


class OneNorm(UnitNorm):
    def forward(self, x):
        return F.normalize(x, p=1.0, dim=-1) * self.g


class OtherDimension(UnitNorm):
    """Its scale is not small."""

    def forward(self, x):
        return F.normalize(x, dim=-1) * torch.sigmoid(x)


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class FinalLayer(nn.Module):
    """DiT's."""

    def __init__(self):
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(WIDTH, 64)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(EMBEDDING, 2 * WIDTH))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class FinalLayerWritten(FinalLayer):
    def forward(self, x, c):
        c = self.adaLN_modulation(c)
        scale, shift = c[:, None, :WIDTH], c[:, None, WIDTH:]
        x = self.norm_final(x) * (scale + 1)
        x = torch.add(shift, x)
        return self.linear(x)


class FinalLayerScale(FinalLayer):
    def forward(self, x, c):
        scale = self.adaLN_modulation(c).chunk(2, dim=1)[0][:, None]
        return self.linear((1.0 + scale) * self.norm_final(x))


class ScaleShift(nn.Module):
    """Of a residual block of a diffusion model."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.GroupNorm(8, CHANNELS), nn.SiLU()
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(EMBEDDING, 2 * CHANNELS))
        self.conv = nn.Conv2d(CHANNELS, 8, 3, padding=1)

    def forward(self, x, emb):
        emb_out = self.emb_layers(emb).type(x.dtype)
        while len(emb_out.shape) < len(x.shape):
            emb_out = emb_out[..., None]
        scale, shift = torch.chunk(emb_out, 2, dim=1)
        h = self.norm(x) * (1 + scale) + shift
        return self.conv(self.act(h))


class ScaleShiftNone(ScaleShift):
    def forward(self, x, emb):
        shift, scale = self.emb_layers(emb)[:, :, None, None].chunk(2, dim=1)
        return self.conv(self.act(torch.addcmul(shift, self.norm(x), 1 + scale)))


class ScaleShiftWritten(ScaleShift):
    def forward(self, x, emb):
        emb = self.emb_layers(emb).unsqueeze(-1).unsqueeze(-1)
        time_scale, time_shift = torch.chunk(emb, 2, dim=1)
        x = self.norm(x)
        x = x * (time_scale + 1) + time_shift
        return self.conv(x * torch.sigmoid(x))


def half(module):
    """In bfloat16, with norms in float32."""
    module = module.bfloat16()
    for part in module.modules():
        if isinstance(part, (nn.LayerNorm, nn.GroupNorm, NoBias)):
            part.float()
    return module


def wide(module):
    """Torch's norms, because x.float() does not fit parameters of float64."""
    for part in module.modules():
        base = next((base for base in (nn.LayerNorm, nn.GroupNorm) if isinstance(part, base)), None)
        if base is not None:
            part.forward = types.MethodType(lambda self, x, base=base: base.forward(self, x.to(self.weight)), part)
    return module.double()


def program(of, op, stock, target=1.0, inputs=None, dtype=torch.float32, **more):
    images = hasattr(of, "images") or issubclass(of, ScaleShift)
    # In auto, a group norm alone is hfnn's from 2^21 elements on; torch's three ops are replaced from 2^19 on.
    shape = (16 if inputs else 4, CHANNELS, 64, 64) if images else (4, 512, WIDTH)
    shape = (4, 4, 128, WIDTH) if of is HeadNorm else shape
    unit = dtype.itemsize * torch.Size(shape).numel()
    alone = issubclass(of, (FinalLayer, ScaleShift, HeadNorm, Between))
    make = of if alone else lambda: Before(of)
    build = make if dtype is torch.float32 else lambda: half(make())
    draw = lambda: (torch.randn(shape).to(dtype), *([torch.randn(shape[0], EMBEDDING)] if inputs else []))  # noqa: E731
    target = None if target is None else target * unit
    return Program(name=of.__name__, build=build, inputs=draw, op=op, stock=stock * unit, target=target, **more)


LOW = {"dtype": torch.bfloat16, "wide": wide}
PROGRAMS = [
    program(ClipNorm, "layer_norm", 3, **LOW),
    program(NormLikeInput, "layer_norm", 3, **LOW),
    program(Fp32Norm, "layer_norm", 3, **LOW),
    program(NoBias, "layer_norm", 3, **LOW),
    program(Between, "layer_norm", 3, **LOW),
    program(GroupNorm32, "group_norm", 3, **LOW),
    program(Fp32GroupNorm, "group_norm", 3, **LOW),
    program(FixedType, "layer_norm", 3, None, **LOW),
    program(Doubled, "layer_norm", 3, None, **LOW),
    program(Rounded, "layer_norm", 3, None, **LOW),
    program(UnitNorm, "normalize", 3),
    program(UnitNormRoot, "normalize", 3),
    program(UnitNormShifted, "normalize", 3),
    program(UnitNormImages, "normalize", 3 + 2 / 32, 1 + 1 / 32),
    program(InnerNorm, "affine", 3),
    program(HeadNorm, "normalize", 3),
    program(OneNorm, "normalize", 3, None),
    program(OtherDimension, "affine", 4, None),
    program(FinalLayer, "affine", 3, inputs=True),
    program(FinalLayerWritten, "affine", 3, inputs=True),
    program(FinalLayerScale, "affine", 3, inputs=True),
    program(ScaleShift, "affine", 4, inputs=True),
    program(ScaleShiftWritten, "affine", 5, inputs=True),
    program(ScaleShiftNone, "affine", 4, None, inputs=True),
]
