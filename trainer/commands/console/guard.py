"""Admits only requests with the console's token, from its own pages, to one of its host names.

A page of another origin can send requests to loopback, too, and can point a name of its own at it (DNS rebinding), and
other users of the machine reach its port. So every request needs the cookie that only the printed address gives and a
known Host, and if it changes anything, the console's own Origin.
"""

import hmac
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.observe.page_server import is_known_host

TOKEN = "token"  # the query that brings it
READS = ("GET", "HEAD")
POLICY = (
    *("default-src 'none'", "script-src 'self'", "style-src 'self' 'unsafe-inline'", "img-src 'self' data:"),
    *("connect-src 'self'", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"),
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, a form of this page would send the Origin "null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Passes requests on to the pages, or refuses them."""

    def __init__(self, app: ASGIApp, *, token: str, port: int, host: str) -> None:
        """Guards an application.

        Args:
            host: name or address that it listens on.
        """
        self._app, self._token, self._host = app, token, host
        self._cookie = f"trainer-console-{port}"  # cookies do not tell ports apart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no websockets
            return await self._app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not host or not is_known_host(host, [self._host]):
            return PlainTextResponse("unknown host name; use the address that the console printed\n", 421)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        if scope["method"] in READS and TOKEN in query:
            return self._let_in(scope, query)
        if not self._is_known(headers.get("cookie", "")):
            return PlainTextResponse("open the address that the console printed: it has the token\n", 401)
        if scope["method"] not in READS and not _is_own(headers, host):
            return PlainTextResponse("only the console's own pages may do this\n", 403)
        return None

    def _let_in(self, scope: Scope, query: dict[str, str]) -> Response:
        """Moves the token from the address, where it could be seen, to a cookie."""
        if not hmac.compare_digest(query.pop(TOKEN).encode(), self._token.encode()):
            return PlainTextResponse("this token is not the console's; open the address that it printed\n", 401)
        path = "/" + scope["path"].lstrip("/")  # "//other.example" would lead elsewhere
        answer = RedirectResponse(f"{path}?{urlencode(query)}" if query else path, 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_known(self, cookies: str) -> bool:
        value = cookie_parser(cookies).get(self._cookie)
        return value is not None and hmac.compare_digest(value.encode(), self._token.encode())


def _is_own(headers: Headers, host: str) -> bool:
    """Whether a request comes from a page of this console; requests without an origin do not."""
    site = headers.get("sec-fetch-site")
    return headers.get("origin") == f"http://{host}" and site in (None, "same-origin")
