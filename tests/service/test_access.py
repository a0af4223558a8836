"""Named tokens with roles: what each may do, that a revoked one ends at once, and who did what."""

import json
import stat

import pytest
from live_api import GENERATION, JOBS

from brim.cli import main
from brim.service.access import TokenFile

MODELS, TOKENS, ACTIONS = "/api/models", "/api/tokens", "/api/actions"


@pytest.fixture
def tokens(api):
    """A token of each role, by its role."""
    known = TokenFile(api.settings.data)
    return {role: known.add(f"{role}.1", role)[1] for role in ("viewer", "operator", "administrator")}


@pytest.mark.parametrize(
    ("method", "path", "body", "least"),
    [
        ("GET", JOBS, None, "viewer"),
        ("GET", "/docs", None, "viewer"),
        ("GET", MODELS, None, "viewer"),
        ("POST", JOBS, GENERATION, "operator"),
        ("POST", f"{JOBS}/validate", GENERATION, "operator"),
        ("POST", f"{JOBS}/{'0' * 32}/cancel", None, "operator"),
        ("DELETE", f"/api/datasets/{'0' * 32}", None, "operator"),
        ("PATCH", f"/api/runs/{'0' * 32}", {"notes": "x"}, "operator"),
        ("POST", "/api/segment", None, "operator"),
        ("POST", MODELS, {"name": "m", "run_id": "0" * 32}, "administrator"),
        ("GET", TOKENS, None, "administrator"),
        ("POST", TOKENS, {"name": "eve", "role": "viewer"}, "administrator"),
        ("DELETE", f"{TOKENS}/nobody", None, "administrator"),
        ("GET", ACTIONS, None, "administrator"),
        ("GET", f"{TOKENS}/nope", None, "administrator"),
    ],
)
def test_a_role_may_do_what_it_is_for_and_is_told_which_role_it_needs(api, tokens, method, path, body, least):
    order = list(tokens)
    for role, token in tokens.items():
        answer = api.ask(method, path, body, token=token)

        allowed = order.index(role) >= order.index(least)
        assert (answer.status != 403) == allowed, (role, answer.status)
        assert answer.status != 401
        if not allowed:
            expected = f'"{role}.1" has the role {role}; {method} {path} needs the role {least}'
            assert answer.json["detail"].startswith(expected)


def test_a_token_is_made_listed_and_revoked_over_http_and_its_text_is_not_kept(api):
    made = api.post(TOKENS, {"name": "ann@lab.org", "role": "operator", "days": 2})

    assert made.status == 201
    token = made.json["token"]
    assert made.json["expires_at"] > made.json["created_at"]
    assert api.get("/api/me", token=token).json == {"name": "ann@lab.org", "role": "operator"}
    assert [(row["name"], row["role"]) for row in api.get(TOKENS).json["tokens"]] == [("ann@lab.org", "operator")]
    assert token not in api.get(TOKENS).body.decode()
    file = api.settings.data / "tokens.json"
    assert token not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert api.post(TOKENS, {"name": "ann@lab.org", "role": "viewer"}).status == 409
    assert api.delete(f"{TOKENS}/ann@lab.org").status == 204
    assert api.get("/api/me", token=token).status == 401
    assert api.delete(f"{TOKENS}/ann@lab.org").status == 404


@pytest.mark.parametrize(
    "body",
    [
        {"name": "a b"}, {"name": ""}, {"name": "../x"}, {"name": "ann", "role": "boss"}, {"name": "ann", "days": 0},
        {"name": "ann", "days": 1e9}, {"name": "ann", "more": 1}, {}, [], {"name": 3},
    ],
)  # fmt: skip
def test_a_token_that_makes_no_sense_is_rejected(shared, body):
    assert shared.post(TOKENS, body).status in (400, 422)


def test_the_session_of_a_browser_has_the_role_of_its_token_and_ends_with_it(api, tokens):
    entry = api.get(f"/?token={tokens['viewer']}", token=None)
    cookie = {"Cookie": entry.headers["set-cookie"].split(";")[0]}

    assert entry.status == 303
    assert api.get("/api/me", token=None, headers=cookie).json["role"] == "viewer"
    assert api.post(JOBS, GENERATION, token=None, headers=cookie).status == 403
    out = api.get("/auth/logout", token=None, headers=cookie)
    assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (303, True)
    api.delete(f"{TOKENS}/viewer.1")
    assert api.get("/api/me", token=None, headers=cookie).status == 401


def test_an_expired_token_ends(api):
    _, text = TokenFile(api.settings.data).add("ann", "viewer", days=1e-9)

    assert api.get("/api/me", token=text).status == 401


def test_a_job_and_the_log_say_who_did_it(api, tokens):
    job = api.post(JOBS, GENERATION, token=tokens["operator"]).json
    api.post(f"{JOBS}/{job['id']}/cancel", token=tokens["administrator"])
    api.post(JOBS, GENERATION, token=tokens["viewer"])
    own = api.submit()

    assert job["submitted_by"] == "operator.1"
    assert "submitted_by" not in own
    rows = [(row["by"], row["action"], row["about"], row["status"]) for row in api.get(ACTIONS).json["actions"]]
    assert rows == [
        ("shared token", "Submit a job", f"{JOBS}/{own['id']}", 202),
        ("viewer.1", "POST", JOBS, 403),
        ("administrator.1", "Cancel a job", f"{JOBS}/{job['id']}/cancel", 202),
        ("operator.1", "Submit a job", f"{JOBS}/{job['id']}", 202),
    ]
    assert len(api.get(f"{ACTIONS}?limit=2").json["actions"]) == 2


def test_a_damaged_file_of_tokens_ends_them_and_leaves_the_shared_one(api, tokens):
    (api.settings.data / "tokens.json").write_text("{")

    assert api.get("/api/me", token=tokens["viewer"]).status == 401
    answer = api.get(TOKENS)
    assert answer.status == 507
    assert "restore it from a copy" in answer.json["detail"]


def test_tokens_are_made_listed_and_revoked_on_the_command_line(api, capsys):
    data = ["--data", str(api.settings.data)]

    assert main(["tokens", "add", "ann", "--role", "operator", *data]) == 0
    token = capsys.readouterr().out.strip()
    assert api.get("/api/me", token=token).json == {"name": "ann", "role": "operator"}
    assert main(["tokens", "list", "--json", *data]) == 0
    listed = json.loads(capsys.readouterr().out)["tokens"]
    assert [(row["name"], row["role"], row["expires_at"]) for row in listed] == [("ann", "operator", None)]
    assert main(["tokens", "add", "ann", *data]) == 2
    assert "revoke it, or choose another" in capsys.readouterr().err
    assert main(["tokens", "revoke", "ann", *data]) == 0
    assert api.get("/api/me", token=token).status == 401
    assert main(["tokens", "revoke", "ann", *data]) == 2
    assert main(["tokens", "log", "--json", *data]) == 0
    actions = json.loads(capsys.readouterr().out.splitlines()[-1])["actions"]
    assert [(row["action"], row["about"]) for row in actions] == [
        ("Revoke a named token", "ann"),
        ("Make a named token", "ann"),
    ]
