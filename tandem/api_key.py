"""The key that this host's clients send to a gateway that wants one."""

import os

VARIABLE = "TANDEM_API_KEY"


def authorization(api_key: str | None = None) -> dict[str, str]:
    """As HTTP's header and gRPC's metadata: that key, or the environment's when it is None. Empty without either."""
    key = os.environ.get(VARIABLE, "") if api_key is None else api_key
    return {"authorization": f"Bearer {key}"} if key else {}
