"""h5dump and h5repack read and copy the files of this build: python repack_hdf5.py FOLDER COPIES [OPTION ...].

The options are those of h5repack, for the files of tokens. Tables are refused if they are no longer contiguous.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

folder, copies, *options = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
expected = json.loads((folder / "contents.json").read_text())
dumped = 0
for name, found in expected.items():
    with tempfile.TemporaryDirectory() as made:
        raw = Path(made, "raw")
        for dataset, facts in found.items():
            if facts.get("shape") and 0 not in facts["shape"]:
                how = ["-d", f"/{dataset}", "-b", "LE", "-o", raw]
                subprocess.run(["h5dump", *how, folder / name], check=True, capture_output=True)
                if hashlib.sha256(raw.read_bytes()).hexdigest() != facts["sha256"]:
                    sys.exit(f"{name}: h5dump reads other values of {dataset}")
                dumped += 1
    (copies / name).parent.mkdir(parents=True, exist_ok=True)
    how = options if name.endswith(".h5") else []
    subprocess.run(["h5repack", *how, folder / name, copies / name], check=True)
version = subprocess.run(["h5dump", "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]
command = " ".join(["h5repack", *options])
print(f"h5dump {version} reads all {dumped} datasets, {command} copies all {len(expected)} files")
