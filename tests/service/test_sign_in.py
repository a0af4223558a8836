"""Sign-in at a provider of OpenID Connect that is started here and signs its tokens with a key of its own."""

import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey
from live_api import running

from brim.errors import ConfigError
from brim.service.access import Access, Actions
from brim.service.api.sign_in import STATE_COOKIE, SignIn
from brim.service.settings import Settings, from_options

CLIENT, SECRET = "brim", "s3cret:%"
ROLES = "ann@lab.org=administrator, *@lab.org=viewer"


class Provider:
    """Discovery, keys, and a token endpoint that checks code, PKCE verifier, redirect and the client's secret."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": "1", "use": "sig", "alg": "RS256"}, private=True)
        self.signing = self.key
        self.claims: dict[str, Any] = {}
        self.description: dict[str, Any] = {}  # what it says of itself in other words than usual
        self.asked: dict[str, str] = {}  # of the authorization
        self.forms: list[dict[str, str]] = []
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers = {"/.well-known/openid-configuration": provider.about, "/keys": provider.keys}
                self._send(answers[self.path]())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: values[0] for name, values in parse_qs(body).items()}
                provider.forms.append(form)
                fits = provider.fits(form, self.headers.get("Authorization", ""))
                self._send({"id_token": provider.token()} if fits else {"error": "invalid_grant"}, 200 if fits else 400)

            def _send(self, value: Any, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def about(self) -> dict[str, Any]:
        paths = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/keys"}
        known = {"issuer": self.issuer, **{name: self.issuer + path for name, path in paths.items()}}
        return known | self.description

    def keys(self) -> dict[str, Any]:
        return {"keys": [self.key.as_dict(private=False)]}

    def fits(self, form: dict[str, str], authorization: str) -> bool:
        digest = sha256(form["code_verifier"].encode()).digest()
        basic = "Basic " + base64.b64encode(b"brim:s3cret%3A%25").decode()
        by_form = "token_endpoint_auth_methods_supported" in self.description
        return (
            form["code"] == "the-code"
            and form["redirect_uri"] == self.asked["redirect_uri"]
            and base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == self.asked["code_challenge"]
            and (authorization, form.get("client_secret")) == (("", SECRET) if by_form else (basic, None))
        )

    def token(self) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "sub": "17", "iat": now, "exp": now + 300}
        claims |= {"nonce": self.asked["nonce"], "email": "Ann@lab.org", "email_verified": True, **self.claims}
        return jwt.encode({"alg": "RS256", "kid": "1"}, claims, self.signing, algorithms=["RS256"])


@pytest.fixture(scope="module")
def shared_provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


@pytest.fixture
def provider(shared_provider: Provider) -> Provider:
    shared_provider.claims, shared_provider.description = {}, {}
    shared_provider.signing = shared_provider.key
    return shared_provider


@pytest.fixture(scope="module")
def signing(shared_provider, tmp_path_factory):
    """An API whose people sign in at the provider."""
    options = {"oidc_client_id": CLIENT, "oidc_client_secret": SECRET, "oidc_roles": ROLES}
    data = tmp_path_factory.mktemp("sign_in") / "data"
    with running(data, oidc_issuer=shared_provider.issuer, **options) as made:
        yield made


def sign_in(api: Any, provider: Provider, **changes: str) -> Any:
    """The answer to the browser that comes back from the provider."""
    there = api.get("/auth/login", token=None)
    assert there.status == 303, there.body
    address = urlsplit(there.headers["location"])
    assert f"{address.scheme}://{address.netloc}{address.path}" == f"{provider.issuer}/authorize"
    provider.asked = {name: values[0] for name, values in parse_qs(address.query).items()}
    state = changes.get("state", provider.asked["state"])
    cookie = changes.get("cookie", there.headers["set-cookie"].split(";")[0])
    code = changes.get("code", "code=the-code")
    return api.get(f"/auth/callback?{code}&state={state}", token=None, headers={"Cookie": cookie})


def test_a_person_signs_in_and_has_the_role_that_the_administrator_gave(signing, provider):
    page = signing.get("/", token=None, headers={"Accept": "text/html"})
    assert 'href="/auth/login"' in page.body.decode()

    answer = sign_in(signing, provider)

    assert answer.status == 200, answer.body
    assert 'content="0;url=/"' in answer.body.decode()
    cookies = answer.headers["set-cookie"]
    assert "SameSite=Strict" in cookies
    session = {"Cookie": cookies.split(";")[0]}
    assert signing.get("/api/me", token=None, headers=session).json == {"name": "ann@lab.org", "role": "administrator"}
    (row,) = [row for row in signing.get("/api/tokens").json["tokens"] if row["name"] == "ann@lab.org"]
    begin, end = (datetime.fromisoformat(row[name]) for name in ("created_at", "expires_at"))
    assert (row["source"], (end - begin).total_seconds()) == ("sign-in", pytest.approx(12 * 3600, abs=5))
    assert signing.get("/api/actions?limit=1").json["actions"][0]["action"] == "Sign in"

    signing.delete("/api/tokens/ann@lab.org")
    assert signing.get("/api/me", token=None, headers=session).status == 401


def test_the_most_exact_pattern_gives_the_role(signing, provider):
    provider.claims = {"email": "bob@lab.org"}
    session = {"Cookie": sign_in(signing, provider).headers["set-cookie"].split(";")[0]}

    assert signing.get("/api/me", token=None, headers=session).json == {"name": "bob@lab.org", "role": "viewer"}


def test_it_asks_with_pkce_a_nonce_and_a_state(signing, provider):
    answers = [signing.get("/auth/login", token=None) for _ in range(2)]
    first, second = (parse_qs(urlsplit(answer.headers["location"]).query) for answer in answers)
    flags = {"HttpOnly", "SameSite=lax", "Max-Age=600", "Path=/auth/callback"}
    assert flags <= set(answers[0].headers["set-cookie"].split("; "))

    assert first["code_challenge_method"] == ["S256"]
    assert first["redirect_uri"] == [f"http://127.0.0.1:{signing.port}/auth/callback"]
    for name in ("code_challenge", "nonce", "state"):
        assert first[name] != second[name]


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"iss": "http://127.0.0.1:1"}, "could not be verified"),
        ({"aud": "another"}, "could not be verified"),
        ({"nonce": "another"}, "could not be verified"),
        ({"exp": 1}, "could not be verified"),
        ({"azp": "another"}, "could not be verified"),
        ({"email": "eve@evil.org"}, "eve@evil.org has no role here"),
        ({"email": "ann@lab.org", "email_verified": False}, "has not verified the address"),
        ({"email": ""}, "did not say your email"),
        ({"email": "<script>@evil.org"}, "&lt;script&gt;@evil.org has no role here"),
    ],
)
def test_what_the_provider_says_of_somebody_else_or_for_another_client_is_rejected(signing, provider, claims, words):
    provider.claims = claims
    answer = sign_in(signing, provider)

    assert answer.status == 403
    assert words in answer.body.decode()
    assert "brim_session" not in answer.headers.get("set-cookie", "")


def test_a_token_that_another_key_signed_is_rejected(signing, provider):
    provider.signing = RSAKey.generate_key(2048, {"kid": "1"}, private=True)

    assert sign_in(signing, provider).status == 403


def test_a_return_that_was_not_begun_here_is_rejected(signing, provider):
    assert sign_in(signing, provider, state="another").status == 400
    assert sign_in(signing, provider, cookie="").status == 400
    assert sign_in(signing, provider, cookie="brim_sign_in=e30.00").status == 400
    assert sign_in(signing, provider, cookie="brim_sign_in=%%.é".encode().decode("latin-1")).status == 400
    assert sign_in(signing, provider, code="error=access_denied").status == 403
    assert sign_in(signing, provider, code="code=stolen").status == 503
    assert signing.get("/auth/callback", token=None).status == 400
    assert signing.ask("POST", "/auth/callback", token=None).status == 401


def test_a_sign_in_must_be_finished_within_ten_minutes(tmp_path, monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("brim.service.api.sign_in.time", SimpleNamespace(time=lambda: clock.now_s))
    sign_in = SignIn(Settings(data=tmp_path, token="t"), Access(tmp_path, "t"), Actions(tmp_path))
    cookie = f"{STATE_COOKIE}={sign_in._seal({'state': 'x'})}"

    found = []
    for clock.now_s in (1599.0, 1601.0):
        found.append(sign_in._open(cookie) is not None)
    assert found == [True, False]


def test_a_provider_may_want_the_secret_in_the_form_and_a_proxy_the_address_of_its_own(tmp_path, provider):
    provider.description = {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
    options = {"oidc_client_id": CLIENT, "oidc_client_secret": SECRET, "oidc_roles": ROLES}
    url = "https://brim.lab.org/"
    with running(tmp_path / "data", oidc_issuer=provider.issuer, public_url=url, **options) as api:
        assert sign_in(api, provider).status == 200
        assert provider.asked["redirect_uri"] == "https://brim.lab.org/auth/callback"


def test_a_provider_that_calls_itself_another_is_not_believed(tmp_path, provider):
    provider.description = {"issuer": "https://login.lab.org"}
    options = {"oidc_client_id": CLIENT, "oidc_roles": ROLES}
    with running(tmp_path / "data", oidc_issuer=provider.issuer, **options) as api:
        answer = api.get("/auth/login", token=None)

    assert (answer.status, "does not fit the settings" in answer.body.decode()) == (503, True)


def test_without_a_provider_there_is_no_sign_in(shared):
    assert shared.get("/auth/login", token=None).status == 401
    assert shared.get("/auth/callback?code=x&state=y", token=None).status == 401


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"BRIM_OIDC_ISSUER": "http://login.lab.org"}, "oidc_issuer"),
        ({"BRIM_OIDC_CLIENT_ID": ""}, "oidc_client_id"),
        ({"BRIM_OIDC_ROLES": "ann@lab.org=boss"}, "oidc_roles"),
        ({"BRIM_PUBLIC_URL": "ftp://lab.org"}, "public_url"),
    ],
)
def test_settings_of_a_provider_that_cannot_work_are_rejected(tmp_path, changes, field):
    good = {"BRIM_OIDC_ISSUER": "https://login.lab.org", "BRIM_OIDC_CLIENT_ID": "brim", "BRIM_OIDC_ROLES": ROLES}
    settings = from_options(data=tmp_path, environ={**good, "BRIM_OIDC_CLIENT_SECRET": SECRET})
    assert settings.oidc_claim == "email"
    assert SECRET not in repr(settings)
    assert Settings.from_json(settings.to_json()) == settings

    with pytest.raises(ConfigError) as caught:
        from_options(data=tmp_path, environ={**good, **changes})
    assert caught.value.field == field
