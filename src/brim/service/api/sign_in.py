"""Sign-in at an OpenID Connect provider: authorization code flow with PKCE, one redirect there and one back.

/auth/login      remembers state, nonce and verifier in a signed cookie, and redirects to the provider
/auth/callback   exchanges the code, verifies the ID token, finds the role, and sets the session's cookie

The ID token's signature is verified with the provider's keys; issuer, audience, expiry and nonce must be ours. Brim
keeps the name, the role and the time, and no token of the provider's.
"""

import asyncio
import base64
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from hashlib import sha256
from html import escape
from typing import Any, Final, cast
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import httpx
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Scope

from brim.errors import BrimError
from brim.service.access import Access, Actions, Role
from brim.service.settings import Settings, role_patterns

log = logging.getLogger(__name__)

LOGIN: Final = "/auth/login"
CALLBACK: Final = "/auth/callback"
LOGOUT: Final = "/auth/logout"
ALGORITHMS: Final = ("RS256", "PS256", "ES256", "EdDSA", "RS384", "ES384", "RS512", "ES512")  # never none or HS256
STATE_COOKIE: Final = "brim_sign_in"
STATE_S: Final = 600  # to sign in at the provider
SESSION_S: Final = 12 * 3600
TIMEOUT_S: Final = 10.0
LEEWAY_S: Final = 60  # between two machines' clocks
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Sign in · brim</title>{head}</head><body><main><h1>{title}</h1><p>{text}</p></main></body></html>
"""
# a page and not a redirect: after one that began at the provider, browsers keep a SameSite=Strict cookie to themselves
_FORWARD = '<meta http-equiv="refresh" content="0;url=/">'


class SignInError(Exception):
    """A sign-in that fails: a status, and one sentence for the person."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SignIn:
    """The provider that the administrator has named in the settings."""

    def __init__(self, settings: Settings, access: Access, actions: Actions) -> None:
        self._settings, self._access, self._actions = settings, access, actions
        self._issuer = settings.oidc_issuer.rstrip("/")
        self._roles = role_patterns(settings.oidc_roles)
        self._key = sha256(f"brim sign-in {settings.token}".encode()).digest()
        self._known: dict[str, Any] = {}  # the provider's addresses

    def takes(self, scope: Scope) -> bool:
        return scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in (LOGIN, CALLBACK)

    async def answer(self, scope: Scope, cookie: Callable[[str], str]) -> Response:
        """The answer to one of the two addresses; `cookie` makes the cookie of a session."""
        try:
            if scope["path"] == LOGIN:
                return await self._begin(scope)
            return await self._finish(scope, cookie)
        except SignInError as failure:
            again = f'{escape(str(failure))} <a href="{LOGIN}">Try again</a>'
            return HTMLResponse(_PAGE.format(head="", title="Not signed in", text=again), failure.status)

    async def _begin(self, scope: Scope) -> Response:
        provider = await self._provider()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        base = self._settings.public_url.rstrip("/") or f"http://{_header(scope, b'host')}"
        asked = {"state": state, "nonce": nonce, "verifier": verifier, "redirect": base + CALLBACK}
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": asked["redirect"],
            "scope": "openid email profile",
            "state": state,
            "nonce": nonce,
            "code_challenge": _base64(sha256(verifier.encode()).digest()),
            "code_challenge_method": "S256",
        }
        address = provider["authorization_endpoint"]
        answer = RedirectResponse(f"{address}{'&' if '?' in address else '?'}{urlencode(query)}", 303)
        # Lax: the provider sends the browser back, which is another site
        answer.set_cookie(
            STATE_COOKIE, self._seal(asked), max_age=STATE_S, path=CALLBACK, httponly=True, samesite="lax"
        )
        return answer

    async def _finish(self, scope: Scope, cookie: Callable[[str], str]) -> Response:
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        asked = self._open(_header(scope, b"cookie"))
        if asked is None or not hmac.compare_digest(query.get("state", "").encode(), asked["state"].encode()):
            raise SignInError(400, "The sign-in took too long, or was not begun in this browser.")
        if "code" not in query:
            raise SignInError(
                403, f"The provider did not sign you in: {query.get('error', 'it gave no reason')[:100]}."
            )
        claims = await self._claims(query["code"], asked)
        name, role = self._person(claims)
        try:
            session = self._access.actor(self._access.tokens.sign_in(name, role, SESSION_S)).session
        except BrimError as failure:
            raise SignInError(403, f"{failure.message[:1].upper()}{failure.message[1:]}.") from failure
        self._actions.note(name, role, "Sign in")
        answer = HTMLResponse(_PAGE.format(head=_FORWARD, title="Signed in", text='<a href="/">Continue</a>'))
        answer.delete_cookie(STATE_COOKIE, path=CALLBACK)
        answer.headers.append("set-cookie", cookie(session))
        return answer

    async def _claims(self, code: str, asked: Mapping[str, str]) -> Mapping[str, Any]:
        """The verified claims of the ID token that the provider gives for a code."""
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        provider, settings = await self._provider(), self._settings
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": asked["redirect"],
            "code_verifier": asked["verifier"],
            "client_id": settings.oidc_client_id,
        }
        basic = "client_secret_basic"  # what a provider takes that names no method
        by_form = basic not in provider.get("token_endpoint_auth_methods_supported", [basic])
        auth = None
        if settings.oidc_client_secret and by_form:
            form["client_secret"] = settings.oidc_client_secret
        elif settings.oidc_client_secret:
            auth = httpx.BasicAuth(quote(settings.oidc_client_id, safe=""), quote(settings.oidc_client_secret, safe=""))
        answer, keys = await asyncio.gather(
            _ask("POST", provider["token_endpoint"], data=form, auth=auth), _ask("GET", provider["jwks_uri"])
        )
        try:
            token = jwt.decode(
                str(answer["id_token"]), KeySet.import_key_set(cast("Any", keys)), algorithms=list(ALGORITHMS)
            )
            jwt.JWTClaimsRegistry(
                leeway=LEEWAY_S,
                iss={"essential": True, "value": provider["issuer"]},
                aud={"essential": True, "value": settings.oidc_client_id},
                exp={"essential": True},
                sub={"essential": True},
                nonce={"essential": True, "value": asked["nonce"]},
            ).validate(token.claims)
            if token.claims.get("azp", settings.oidc_client_id) != settings.oidc_client_id:
                raise ValueError("it was issued to another client")
        except (JoseError, ValueError, LookupError, TypeError) as failure:
            log.warning("an ID token was rejected: %s", failure)
            raise SignInError(
                403, "The provider's answer could not be verified; the service's log says why."
            ) from failure
        return token.claims

    def _person(self, claims: Mapping[str, Any]) -> tuple[str, Role]:
        """Name and role of whom the claims describe."""
        name = str(claims.get(self._settings.oidc_claim) or "")[:100]
        if self._settings.oidc_claim == "email":
            name = name.lower()
            if claims.get("email_verified") is False:
                raise SignInError(403, f"The provider has not verified the address {name}.")
        if not name:
            raise SignInError(403, f"The provider did not say your {self._settings.oidc_claim}.")
        role = next((role for pattern, role in self._roles if fnmatchcase(name, pattern)), None)
        if role is None:
            raise SignInError(403, f"{name} has no role here; the administrator can give one.")
        return name, cast("Role", role)

    async def _provider(self) -> dict[str, Any]:
        """The provider's own description, asked for once."""
        if not self._known:
            about = await _ask("GET", f"{self._issuer}/.well-known/openid-configuration")
            named = ("authorization_endpoint", "token_endpoint", "jwks_uri")
            if str(about.get("issuer", "")).rstrip("/") != self._issuer or not all(about.get(each) for each in named):
                raise SignInError(503, "The provider's description does not fit the settings of this service.")
            self._known = about
        return self._known

    # The cookie of a sign-in that has begun

    def _seal(self, asked: Mapping[str, str]) -> str:
        text = _base64(json.dumps({**asked, "until": time.time() + STATE_S}).encode())
        return f"{text}.{self._sign(text)}"

    def _open(self, cookies: str) -> dict[str, str] | None:
        pairs = dict(pair.strip().partition("=")[::2] for pair in cookies.split(";"))
        text, _, signature = pairs.get(STATE_COOKIE, "").strip('"').partition(".")
        if not text or not hmac.compare_digest(signature.encode(), self._sign(text).encode()):
            return None
        asked: dict[str, Any] = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        return asked if time.time() < asked["until"] else None

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode("utf-8", "replace"), sha256).hexdigest()


async def _ask(method: str, address: str, **options: Any) -> dict[str, Any]:
    """The JSON object of the provider."""
    if urlsplit(address).scheme not in ("http", "https"):
        raise SignInError(503, "The provider's description does not fit the settings of this service.")
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            answer = await client.request(method, address, **options)
        values = answer.json()
        if answer.is_success and isinstance(values, dict):
            return values
        log.warning("the sign-in provider answered %d at %s", answer.status_code, urlsplit(address).path)
    except (httpx.HTTPError, ValueError) as failure:
        log.warning("the sign-in provider does not answer: %s", failure)
    raise SignInError(503, "The provider does not answer as it should; try again later.")


def _header(scope: Scope, name: bytes) -> str:
    return "; ".join(value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
