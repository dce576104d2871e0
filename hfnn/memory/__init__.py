"""How many bytes autograd keeps between forward and backward, what keeps them, and the peak memory of a step.

print(hfnn.memory.report(model, ids, labels=ids))   # by module and by op, with the original classes and converted
hfnn.memory.saved_bytes(lambda: model(ids)).total
hfnn.memory.peak_bytes(step, "cuda")
"""

from hfnn.memory.keepers import MemoryReport, MemoryRow, report
from hfnn.memory.peak import peak_bytes
from hfnn.memory.saved import Saved, saved_bytes

__all__ = ["MemoryReport", "MemoryRow", "Saved", "peak_bytes", "report", "saved_bytes"]
