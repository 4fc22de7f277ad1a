"""The build service: a cache over HTTP that also builds what is missing. Nothing here prints.

`server` runs uvicorn with `app`, `catalog` answers from the cache, `page` is for people, and
`builds` has workers build what `request` asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern._lazy import on_first_use

if TYPE_CHECKING:
    from jitkern.service import (
        app as app,
        builds as builds,
        catalog as catalog,
        metrics as metrics,
        page as page,
        request as request,
        server as server,
    )
else:
    __getattr__ = on_first_use(__name__)
