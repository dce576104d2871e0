"""hfrecord._C, reads and checksums in C++: `extension` is the module, or None if it is not built, or switched off by
HFRECORD_NATIVE=0. Then Python does the same.
"""

import os
import sys
import zlib

extension = None
if sys.byteorder == "little" and os.environ.get("HFRECORD_NATIVE", "1") != "0":
    try:
        from hfrecord import _C as extension
    except ImportError:
        extension = None

crc32 = zlib.crc32 if extension is None else extension.crc32
