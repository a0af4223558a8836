"""Named tokens with roles: what each may do, that a revoked one ends at once, and who did what."""

import json
import os
import stat
from datetime import datetime

import pytest
from live_api import GENERATION, JOBS, TOKEN, running

from brim.cli import main
from brim.errors import Conflict
from brim.service import access
from brim.service.access import Access, TokenFile

MODELS, TOKENS, ACTIONS = "/api/models", "/api/tokens", "/api/actions"
NOTHING = "0" * 32
VIEWER, OPERATOR, ADMINISTRATOR = ROLES = ("viewer", "operator", "administrator")
LEAST = {  # by hand: the least role for every route of the API that is not for everybody to read
    f"POST {JOBS}": OPERATOR,
    f"POST {JOBS}/validate": OPERATOR,
    f"POST {JOBS}/{NOTHING}/cancel": OPERATOR,
    f"POST {JOBS}/{NOTHING}/pause": OPERATOR,
    f"POST {JOBS}/{NOTHING}/resume": OPERATOR,
    f"DELETE {JOBS}/{NOTHING}": OPERATOR,
    "POST /api/datasets": OPERATOR,
    f"DELETE /api/datasets/{NOTHING}": OPERATOR,
    f"PATCH /api/runs/{NOTHING}": OPERATOR,
    "POST /api/segment": OPERATOR,
    "POST /api/batch-segment": OPERATOR,
    "POST /api/classify": OPERATOR,
    "POST /api/locate": OPERATOR,
    f"POST {MODELS}": ADMINISTRATOR,
    f"GET {TOKENS}": ADMINISTRATOR,
    f"POST {TOKENS}": ADMINISTRATOR,
    f"DELETE {TOKENS}/nobody": ADMINISTRATOR,
    f"GET {ACTIONS}": ADMINISTRATOR,
}


@pytest.fixture
def tokens(api):
    """A token of each role, by its role."""
    known = TokenFile(api.settings.data)
    return {role: known.add(f"{role}.1", role)[1] for role in ROLES}


def routes_of(api) -> set[str]:
    names = {"{id}": NOTHING, "{index}": "0", "{name:path}": "a", "{name}": "nobody"}
    found = set()
    for route in api.api.routes:
        path = route.path
        for name, value in names.items():
            path = path.replace(name, value)
        found |= {f"{method} {path}" for method in getattr(route, "methods", None) or ()}
    return found


def test_every_role_may_use_the_routes_that_it_is_for_and_is_told_which_role_others_need(api, tokens):
    routes = {route for route in routes_of(api) if not route.endswith("/events")}
    assert LEAST.keys() <= routes

    for route in sorted(routes):
        method, path = route.split()
        least = LEAST.get(route, VIEWER)
        for role in ROLES:
            answer = api.ask(method, path, token=tokens[role])

            allowed = ROLES.index(role) >= ROLES.index(least)
            assert (answer.status != 403) == allowed, (route, role, answer.status)
            assert answer.status != 401
            if not allowed:
                expected = f'"{role}.1" has the role {role}; {method} {path} needs the role {least}'
                assert answer.json["detail"].startswith(expected)


def test_what_is_no_route_is_for_operators_to_change_and_what_looks_like_a_token_for_administrators(api, tokens):
    cases = (("PUT", "/api/new"), ("HEAD", JOBS), ("GET", f"{TOKENS}/nope"), ("GET", "/api/tokensx"))

    statuses = [api.ask(method, path, token=tokens[VIEWER]).status for method, path in cases]

    assert [status == 403 for status in statuses] == [True, False, True, False]


def test_a_token_is_made_listed_and_revoked_over_http_and_its_text_is_not_kept(api):
    made = api.post(TOKENS, {"name": "ann@lab.org", "role": "operator", "days": 2})

    assert made.status == 201
    token = made.json["token"]
    begin, end = (datetime.fromisoformat(made.json[name]) for name in ("created_at", "expires_at"))
    assert (end - begin).total_seconds() == pytest.approx(2 * 24 * 3600, abs=0.01)
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


@pytest.mark.parametrize("name", ["a b", "../x", "-x", "x" * 101])
def test_a_name_that_could_be_mistaken_is_rejected(shared, name):
    answer = shared.post(TOKENS, {"name": name})

    assert (answer.status, answer.json["field"]) == (422, "name")


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


def test_another_shared_token_ends_every_session_and_leaves_named_tokens(tmp_path):
    sessions = {}
    for shared_token in (TOKEN, "another-token_0123456789"):
        with running(tmp_path / "data", token=shared_token) as api:
            if not sessions:
                named = api.post(TOKENS, {"name": "ann", "role": "viewer"}).json["token"]
                for text in (TOKEN, named):
                    cookie = api.get(f"/?token={text}", token=None).headers["set-cookie"].split(";")[0]
                    sessions[text] = {"Cookie": cookie}
            found = [api.get("/api/me", token=None, headers=cookie).status for cookie in sessions.values()]
            assert found == ([200, 200] if shared_token == TOKEN else [401, 401])
            assert api.get("/api/me", token=named).json == {"name": "ann", "role": "viewer"}


def test_an_expired_token_ends_with_its_session_and_its_name_is_free_again(tmp_path, monkeypatch):
    known = Access(tmp_path, TOKEN)
    made, text = known.tokens.add("ann", "viewer", days=1)
    session = known.of_token(text).session

    for now, is_valid in ((made.created_at + 86_399, True), (made.created_at + 86_401, False)):
        monkeypatch.setattr(access.time, "time", lambda now=now: now)
        assert (known.of_token(text) is not None) == (known.of_session(session) is not None) == is_valid
    again, _ = known.tokens.add("ann", "operator")
    assert known.tokens.all() == [again]


@pytest.mark.parametrize("kept", ["st_mtime_ns", "st_ino", "st_size"])
def test_a_file_of_tokens_that_another_process_changed_is_read_again(tmp_path, kept):
    """Restored from a copy, for example: some of its time, its number and its size may be what they were."""
    known = Access(tmp_path, TOKEN)
    _, text = known.tokens.add("ann", "viewer")
    assert known.of_token(text).name == "ann"
    before = known.tokens.file.stat()
    changed = known.tokens.file.read_text().replace('"ann"', '"eve"' if kept != "st_mtime_ns" else '"anna"')
    target = known.tokens.file if kept != "st_size" else tmp_path / "copy"

    target.write_text(changed)
    os.utime(target, ns=(0, before.st_mtime_ns + (1000 if kept == "st_ino" else 0)))
    target.replace(known.tokens.file)

    assert getattr(known.tokens.file.stat(), kept) == getattr(before, kept)
    assert known.of_token(text).name in ("eve", "anna")


def test_a_person_who_signs_in_again_keeps_the_first_session_and_nobody_takes_the_name_of_a_token(tmp_path):
    known = Access(tmp_path, TOKEN)
    first = known.tokens.sign_in("ann@lab.org", "viewer", 100.0)
    again = known.tokens.sign_in("ann@lab.org", "operator", 200.0)

    assert known.of_session(known.actor(first).session).role == "operator"
    assert again.expires_at - first.expires_at == pytest.approx(100, abs=1)
    assert len(known.tokens.all()) == 1
    known.tokens.add("bob@lab.org", "viewer")
    with pytest.raises(Conflict, match="is the name of a token"):
        known.tokens.sign_in("bob@lab.org", "administrator", 100.0)


def test_a_job_and_the_log_say_who_did_it(api, tokens):
    job = api.post(JOBS, GENERATION, token=tokens["operator"]).json
    api.post(f"{JOBS}/{job['id']}/cancel", token=tokens["administrator"])
    api.post(JOBS, GENERATION, token=tokens["viewer"])
    api.post(f"{JOBS}/validate", GENERATION)  # changes nothing
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
    assert [row["by"] for row in api.get(f"{ACTIONS}?limit=2").json["actions"]] == ["shared token", "viewer.1"]
    assert stat.S_IMODE((api.settings.data / "actions.jsonl").stat().st_mode) == 0o600


def test_a_damaged_file_of_tokens_ends_them_and_leaves_the_shared_one(api, tokens):
    file = api.settings.data / "tokens.json"
    for text in ("{", file.read_text().replace('"viewer"', '"boss"')):
        file.write_text(text)

        assert api.get("/api/me", token=tokens["operator"]).status == 401
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
