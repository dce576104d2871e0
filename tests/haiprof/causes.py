"""Training programs with a planted cause, and healthy ones. Each is a script of its own, run after `BEGIN`."""

BEGIN = """
import gc, logging, mmap, os, random, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

torch.set_num_threads(1)
torch.manual_seed(0)
folder = sys.argv[1]
WIDTH = 512
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(256, WIDTH)

def step(x=x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

def steps(seconds=7.0):
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        yield

class Items(Dataset):
    def __init__(self, make=lambda i: torch.randn(WIDTH)):
        self.make = make
    def __len__(self):
        return 10**6
    def __getitem__(self, i):
        return self.make(i)

def batches(loader, seconds=7.0):
    for batch, _ in zip(loader, steps(seconds)):
        yield batch

def ranks():
    global model, optimizer
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return dist.get_rank()
"""

# name -> (the kind of the first finding, a part of what it says, number of ranks, script)
PLANTED = {
    "a slow loader": (
        *("data-bound", "num_workers=0", 1),
        """
def slow(i):
    time.sleep(0.01)
    return torch.randn(WIDTH)
for batch in batches(DataLoader(Items(slow), batch_size=4)):
    step(batch)
""",
    ),
    "one slow worker": (
        *("slow worker", "Worker 1 of the loader", 1),
        """
def slow(i):
    time.sleep(0.15 if get_worker_info().id == 1 else 0.005)
    return torch.randn(WIDTH)
for batch in batches(DataLoader(Items(slow), batch_size=2, num_workers=3)):
    step(batch)
""",
    ),
    "a lock between threads": (
        *("waits for a lock", "with lock:", 1),
        """
lock = threading.Lock()
def holds():
    while True:
        with lock:
            time.sleep(0.04)
        time.sleep(0.001)
threading.Thread(target=holds, daemon=True).start()
for _ in steps():
    step()
    with lock:
        pass
""",
    ),
    "a sleep": (
        *("asleep", "time.sleep(0.03)", 1),
        """
for _ in steps():
    step()
    time.sleep(0.03)
""",
    ),
    "a slow Python loop": (
        *("outside the model", "total += i % 7", 1),
        """
for _ in steps():
    step()
    total = 0
    for i in range(400000):
        total += i % 7
""",
    ),
    "a slow rank": (
        *("slow rank", "it is late in forward", 2),
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    def forward(self, x):
        for _ in range(6 * int(os.environ["RANK"])):
            x = x + 1e-6 * (x.detach() @ x.detach().T @ x.detach())
        return self.layers(x)
model = Model()
ranks()
for _ in range(160):
    step()
""",
    ),
    "a leak of tensors": (
        *("leak of tensors", "kept.append(torch.ones(200000))", 1),
        """
kept = []
for _ in steps():
    step()
    kept.append(torch.ones(200000))
""",
    ),
    "a leak of graphs": (
        *("leak of graphs", "kept.append(model(x[:100]).mean())", 1),
        """
kept = []
for _ in steps():
    step()
    kept.append(model(x[:100]).mean())
""",
    ),
    "a slow disk": (
        *("slow disk", "os.preadv", 1),
        """
path = os.path.join(folder, "data")
with open(path, "wb") as file:
    file.write(os.urandom(64 << 20))
    os.fsync(file.fileno())
data, page = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4 << 20)
def read(i):
    for _ in range(4):
        os.preadv(data, [page], random.randrange(16) * (4 << 20))
    return torch.randn(WIDTH)
for batch in batches(DataLoader(Items(read), batch_size=2)):
    step(batch)
""",
    ),
    "a full disk": (
        *("disk full", "what writes there fails", 1),
        """
os.chdir(os.environ["FULL"])
with open("earlier", "wb") as file:
    try:
        file.write(bytes(8 << 20))
    except OSError:
        pass
for number, _ in enumerate(steps()):
    step()
    if number % 50 == 0:
        try:
            torch.save(model.state_dict(), "checkpoint")
        except (OSError, RuntimeError) as error:
            print("not saved:", error)
""",
    ),
    "garbage collection": (
        *("garbage collection", "Python's garbage collector takes", 1),
        """
heap = [[i] for i in range(400000)]
for _ in steps():
    step()
    gc.collect()
""",
    ),
    "a checkpoint in every step": (
        *("checkpoints in the steps", "torch.save(", 1),
        """
optimizer = torch.optim.AdamW(model.parameters())
for _ in steps():
    step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(folder, "last"))
""",
    ),
    "logging in every step": (
        *("logging in the steps", "logging.info(", 1),
        """
logging.basicConfig(filename=os.path.join(folder, "log"), level=logging.INFO)
for _ in steps():
    loss = step()
    for name, parameter in model.named_parameters():
        for row in parameter.detach().flatten()[:200]:
            logging.info("%s %.6f %.6f", name, loss, row)
""",
    ),
    "uneven batches": (
        *("uneven batches", "their batches differ", 2),
        """
rank = ranks()
draw = random.Random(rank)
for _ in range(160):
    step(torch.randn(draw.choice((32, 1024)), WIDTH))
""",
    ),
    "imbalance of a pipeline": (
        *("imbalance of a pipeline", "The stage of rank 1", 2),
        """
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(1 + 5 * rank)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for _ in range(100):
    optimizer.zero_grad()
    outputs, inputs = [], []
    for _ in range(4):  # microbatches
        inputs.append(torch.empty(256, WIDTH))
        if rank == 1:
            dist.recv(inputs[-1], 0)
        outputs.append(model(x if rank == 0 else inputs[-1].requires_grad_()))
        if rank == 0:
            dist.send(outputs[-1].detach(), 1)
    for x_in, y in zip(inputs, outputs):
        if rank == 0:
            dist.recv(x_in, 1)
            y.backward(x_in)
        else:
            y.square().mean().backward()
            dist.send(x_in.grad, 0)
    optimizer.step()
""",
    ),
}

# name -> (number of ranks, script)
HEALTHY = {
    "a perceptron": (1, "for _ in steps(): step()"),
    "convolutions": (
        1,
        """
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1))
model(torch.randn(1, 3, 32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in steps(): step(torch.randn(8, 3, 32, 32))
""",
    ),
    "a loader with workers": (
        1,
        "for batch in batches(DataLoader(Items(), 256, num_workers=2, persistent_workers=True)): step(batch)",
    ),
    "a loader without workers": (1, "for batch in batches(DataLoader(torch.randn(99999, WIDTH), 256)): step(batch)"),
    "two ranks": (2, "ranks()\nx = torch.randn(1024, WIDTH)\nfor _ in range(120): step(x)"),
    "accumulated gradients": (
        1,
        """
for _ in steps():
    optimizer.zero_grad()
    for _ in range(4):
        model(x).square().mean().backward()
    optimizer.step()
""",
    ),
    "validation": (
        1,
        """
for number, _ in enumerate(steps()):
    step()
    if number % 20 == 0:
        with torch.no_grad():
            model.eval()
            for _ in range(10): model(x)
            model.train()
""",
    ),
    "checkpoints now and then": (
        1,
        """
for number, _ in enumerate(steps()):
    step()
    if number % 100 == 0: torch.save(model.state_dict(), os.path.join(folder, "last"))
""",
    ),
    "a loss printed now and then": (
        1,
        """
optimizer = torch.optim.AdamW(model.parameters())
for number, _ in enumerate(steps()):
    loss = step()
    if number % 10 == 0: print(loss.item())
""",
    ),
    "a cache that fills": (
        1,
        """
cache = {}
for number, _ in enumerate(steps(9.0)):
    step(cache.setdefault(number % 40, torch.randn(256, WIDTH)))
""",
    ),
}
