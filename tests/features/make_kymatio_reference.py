"""Write kymatio_reference.npz: what kymatio 0.3.0 says about two fixed images.

python -m pip install kymatio==0.3.0 && python tests/make_kymatio_reference.py
(with numpy 2.2 and scipy 1.15; it needs scipy < 1.17)

`stock`: kymatio as it comes; images in float64, but its filters are sampled in float32.
`float64`: the same code with its filters sampled in float64 (numpy.complex64 and float32 replaced
while they are built).
"""
from pathlib import Path
from unittest import mock

import numpy as np

CASES = {"a": ((32, 32), 2, 8), "b": ((21, 26), 3, 6)}


def image(shape):
    "An image without randomness: a ramp, waves, an edge."
    y, x = np.mgrid[:shape[0], :shape[1]].astype(float)
    return .01*x + .3*np.sin(.9*x + .4*y*y/shape[0]) + .5*(x + 2*y > 40)


def main():
    import kymatio.scattering2d.filter_bank as bank
    from kymatio.numpy import Scattering2D

    found = {}
    for name, (shape, J, L) in CASES.items():
        found[f"{name}_stock"] = Scattering2D(J, shape, L=L)(image(shape))
        wider = mock.patch.multiple(bank.np, complex64=np.complex128, float32=np.float64)
        with wider:
            found[f"{name}_float64"] = Scattering2D(J, shape, L=L)(image(shape))
    np.savez_compressed(Path(__file__).with_name("kymatio_reference.npz"), **found)


if __name__ == "__main__":
    main()
