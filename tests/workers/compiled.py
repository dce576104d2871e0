"""One of two gloo ranks: a model compiled by hfnn's backend under DDP has the gradients of all ranks' data."""

import copy

import torch
from gloo import process_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hfnn
from hfnn.compiled import head

WIDE = 512  # a layer fills a bucket of 1 MiB, Dynamo's minimum


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(4))
        )
        self.head = nn.Linear(WIDE, 48, bias=False)

    def forward(self, x, labels):
        logits = self.head(self.body(x))
        return nn.functional.cross_entropy(logits.view(-1, 48), labels.view(-1)), logits


def main(rank, world_size, store):
    head.WORTH_LOGITS = 0
    with process_group(rank, world_size, store):
        torch.manual_seed(0)
        stock = Model()
        x, labels = torch.randn(world_size, 4, 8, WIDE), torch.randint(48, (world_size, 4, 8))
        stock(x, labels)[0].backward()  # the mean over ranks of means over equally many tokens
        wanted = [p.grad for p in stock.parameters()]
        graphs, original = [], head.without_logits
        head.without_logits = lambda graph: graphs.append(graph) or original(graph)
        for inside, bucket in ((False, 25), (False, 1), (True, 25)):
            torch._dynamo.reset()
            graphs.clear()
            model = hfnn.convert(copy.deepcopy(stock), prefer="memory")
            model.zero_grad()
            if inside:
                model.compile(backend="hfnn_eager")
            model = DistributedDataParallel(model, bucket_cap_mb=bucket)
            run = model if inside else torch.compile(model, backend="hfnn_eager")
            for _ in range(2):
                model.zero_grad()
                loss, logits = run(x[rank], labels[rank])
                loss.backward()
                for p, grad in zip(model.parameters(), wanted, strict=True):
                    torch.testing.assert_close(p.grad, grad)
            torch.testing.assert_close(logits + 0, stock(x[rank], labels[rank])[1])
            assert bucket > 1 or len(graphs) > 2, len(graphs)
