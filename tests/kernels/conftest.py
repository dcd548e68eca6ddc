"""Kernels run here under Triton's interpreter, which has to be chosen before Triton is imported.

`test_interpreted.py` starts a process of its own for the `check_*.py` files. What the interpreter
cannot do: products of bfloat16 are wrong without a word, and rounding to 8-bit floats has no carry
(both 3.9); loops to a bound that is only known at run time fail with numpy 2.4 (3.6). Types are
therefore float32 and float16 here.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["check_*.py"]
