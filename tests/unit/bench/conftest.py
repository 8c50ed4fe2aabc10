"""Numpy's BLAS threads wait by spinning: on a busy two-core machine small products then take ten times as long."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
