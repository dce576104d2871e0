"""Convolutions, norms and activations, in whatever words a forward calls them.

The unit is a tensor (N, WIDTH, SIDE, SIDE). The first convolution keeps the input, and a norm what a convolution makes:
these are the target. Whatever stands between a norm and the next convolution can be built again. Stock keeps the norm's
result, where an activation is not in place, and the activation's, which the next convolution reads.
"""

import torch
from program import Program
from torch import nn
from torch.nn import functional as F

N, WIDTH, SIDE = 4, 32, 64
UNIT = 4 * N * WIDTH * SIDE * SIDE
CHANNELS = 4 * 2 * WIDTH / UNIT  # mean and scale of a norm
SAMPLES = N * CHANNELS  # of an instance norm


def conv(inputs=WIDTH, outputs=WIDTH, side=3):
    return nn.Conv2d(inputs, outputs, side, padding=side // 2, bias=False)


class Norm(nn.Module):
    """A norm and an activation between two convolutions."""

    def __init__(self, norm=nn.BatchNorm2d, **options):
        super().__init__()
        self.conv1, self.norm, self.conv2 = conv(), norm(WIDTH, **options), conv()

    def forward(self, x):
        return self.conv2(self.act(self.norm(self.conv1(x))))


class Asked(Norm):
    """A forward that asks whether the module has a part is traced; one that asks for values is not."""

    def forward(self, x):
        y = self.norm(self.conv1(x))
        if hasattr(self, "pool"):
            y = self.pool(y)
        if not torch.isfinite(y.detach().sum()):
            raise ValueError("not finite")
        return self.conv2(F.relu(y))


class AskedInPlace(Norm):
    def forward(self, x):
        y = self.norm(self.conv1(x))
        if getattr(self, "verbose", False) or len(y) > 1000:
            print(y.mean())
        y = F.leaky_relu(y, 0.2, inplace=True)
        return self.conv2(y) if y.shape[2] > 3 else y


class Parametric(Norm):
    def __init__(self):
        super().__init__()
        self.act = nn.PReLU(WIDTH)


class Permuted(Norm):
    """The norm over tokens, the map back over channels."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d)
        self.conv1, self.conv2 = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        y = self.norm(self.conv1(x).permute(0, 2, 1)).permute(0, 2, 1)
        return self.conv2(F.relu(y))


class Doubled(Norm):
    """Nothing builds a product again: the convolution keeps the activation's result."""

    def forward(self, x):
        return self.conv2(F.relu(self.norm(self.conv1(x)) * 2))


class Read(Norm):
    """An op of torch keeps the norm's result. The activation's is built again."""

    def forward(self, x):
        y = self.norm(self.conv1(x))
        return self.conv2(F.relu(y)) + y.sin()


def sequence(*between):
    """Parts of which no pattern knows all."""
    return lambda: nn.Sequential(conv(), *between, conv())


def instance(act, **options):
    """As in pix2pix, CycleGAN and nnU-Net."""
    return lambda: nn.Sequential(conv(), nn.InstanceNorm2d(WIDTH, **options), act(), conv())


class Transition(nn.Module):
    """DenseNet's layer, as a module of the features so far."""

    def __init__(self, inputs):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, WIDTH, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(WIDTH), conv(WIDTH, WIDTH // 4)

    def forward(self, x):
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([out, x], 1)


class Layer(Transition):
    """The same of a list, as in torchvision."""

    def bottleneck(self, features):
        return self.conv1(F.relu(self.bn1(torch.cat(features, 1)), inplace=True))

    def forward(self, features):
        return self.conv2(F.relu(self.bn2(self.bottleneck(features)), inplace=True))


LAYERS = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH + i * WIDTH // 4) for i in range(LAYERS))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(of):
    last = WIDTH + LAYERS * WIDTH // 4
    return lambda: nn.Sequential(conv(), *of(), nn.BatchNorm2d(last), nn.ReLU(inplace=True), conv(last))


class Double(nn.Module):
    """Behind an instance norm a silu: one element that rounding moves over a kink changes all gradients before it."""

    def __init__(self, inputs, outputs, norm):
        super().__init__()
        act = nn.SiLU if norm is nn.InstanceNorm2d else lambda: nn.ReLU(inplace=True)
        parts = (conv(inputs, outputs), norm(outputs), act())
        self.parts = nn.Sequential(*parts, conv(outputs, outputs), norm(outputs), act())

    def forward(self, x):
        return self.parts(x)


class Up(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2), Double(2 * WIDTH, WIDTH, norm)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UpInOneLine(Up):
    def forward(self, x, skip):
        x = torch.cat((skip, self.up(x)), 1)
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, up=Up, norm=nn.BatchNorm2d):
        super().__init__()
        self.inc, self.down = Double(WIDTH, WIDTH, norm), nn.Sequential(nn.MaxPool2d(2), Double(WIDTH, 2 * WIDTH, norm))
        self.up, self.outc = up(norm), nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x):
        x1 = self.inc(x)
        return self.outc(self.up(self.down(x1), x1))


class Stem(nn.Module):
    """The stem and the head of a ViT; the block between them is a norm and a map."""

    def __init__(self):
        super().__init__()
        tokens = (SIDE // 4) ** 2
        self.proj, self.norm = nn.Conv2d(WIDTH, 16 * WIDTH, 4, 4), nn.LayerNorm(16 * WIDTH)
        self.head, self.cls = nn.Linear(16 * WIDTH, 10), nn.Parameter(torch.zeros(1, 1, 16 * WIDTH))
        self.pos = nn.Parameter(torch.randn(1, tokens + 1, 16 * WIDTH))

    def forward(self, x):
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(x)[:, 0])


class Pooled(nn.Module):
    """The end of a ResNet: global pooling and a map."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = conv(), nn.BatchNorm2d(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class Meaned(Pooled):
    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        return self.fc(x.mean((2, 3)))


def drop_path(x, drop_prob: float = 0.0, training: bool = False):
    """As in timm."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)
    return x.div(keep_prob) * random_tensor.floor_()


class Stochastic(nn.Module):
    """A residual block with stochastic depth, before a norm and a convolution."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.conv2, self.bn2 = conv(), nn.BatchNorm2d(WIDTH), conv(), nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        y = self.conv2(F.relu(self.bn1(self.conv1(x))))
        x = x + drop_path(self.bn2(y), 0.2, self.training)
        return x


def program(name, build, stock, target, op="hfnn.BatchNorm", **more):
    inputs = lambda: (torch.randn(N, WIDTH, SIDE, SIDE),)  # noqa: E731
    return Program(name=name, build=build, inputs=inputs, op=op, stock=stock * UNIT, target=target * UNIT, **more)


INSTANCE = "hfnn.InstanceNorm2d"
# The input and the first features; a unit and a quarter a layer. Lists: also the first two wholes, of which nothing
# says that their parts will be read again. Stock keeps each whole twice: as it is, and after norm and activation.
DENSE = 2 + LAYERS * 1.25
# The input, four results of convolutions, two of half a unit, the pooled features, and those that are read with the
# skip. The skip itself, three results of norms and activations, and the whole can be built again.
UNETS = 1 + 4 + 2 / 2 + 1 / 4 + 1 + 1 / 64
PROGRAMS = [
    program("a forward that asks for values", Asked, 3, 2 + CHANNELS),
    program("in place in such a forward", AskedInPlace, 3, 2 + CHANNELS),
    program("prelu", Parametric, 4, 2 + CHANNELS),
    program("permuted", Permuted, 4, 2 + CHANNELS),
    program("a sequence with other parts", sequence(nn.BatchNorm2d(WIDTH), nn.Hardtanh(), nn.Dropout2d(0.0)), 4, 2),
    program("pix2pix", instance(lambda: nn.ReLU(True)), 3, 2 + SAMPLES, INSTANCE),
    program("pix2pix, leaky", instance(lambda: nn.LeakyReLU(0.2, True)), 3, 2 + SAMPLES, INSTANCE),
    program("nnU-Net", instance(lambda: nn.LeakyReLU(inplace=True), affine=True), 3, 2 + SAMPLES, INSTANCE),
    program("a silu", instance(nn.SiLU, affine=True), 4, 2 + SAMPLES, INSTANCE),
    program("DenseNet", densenet(lambda: [Transition(WIDTH + i * WIDTH // 4) for i in range(LAYERS)]), 37.5, DENSE),
    program("DenseNet of lists", densenet(lambda: [Block()]), 37.5, DENSE + 2.25),
    program("U-Net", UNet, 13.75, UNETS),
    program("U-Net in one line", lambda: UNet(UpInOneLine), 13.75, UNETS),
    program("U-Net with instance norms", lambda: UNet(norm=nn.InstanceNorm2d), 18.75, UNETS, INSTANCE),
    program("stem and head of a ViT", Stem, 3, 2, "hfnn.LayerNorm"),
    program("global pooling", Pooled, 3, 2),
    program("a mean", Meaned, 3, 2),
    program("stochastic depth", Stochastic, 4, 3, draws=True),
    program("a product between", Doubled, 3, 3),
    program("a norm's result that is read as it is", Read, 4, 3),
]
