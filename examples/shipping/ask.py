import json
import sys
import urllib.request
from pathlib import Path

from jitkern import Target

token = Path("token").read_text().strip()
line = Path("calls.jsonl").read_text().splitlines()[0]
body = {"schema": 1, "call": line, "targets": [str(Target.current("cpu"))], "want": []}
request = urllib.request.Request(  # noqa: S310  the URL is your own
    f"{sys.argv[1]}/v1/build", json.dumps(body).encode(), {"Authorization": f"Bearer {token}"}
)
with urllib.request.urlopen(request) as answer:  # noqa: S310
    Path("answer.tar").write_bytes(answer.read())
