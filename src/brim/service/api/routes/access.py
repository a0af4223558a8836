"""Who may do what: named tokens with roles, for administrators; what was done; and who is asking."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool

from brim.config import Doc, Length, Range, read, schema
from brim.service.access import MAX_DAYS, NAME_PATTERN, NamedToken, Role
from brim.service.api import shapes
from brim.service.api.body import read_json
from brim.service.api.context import By, Here
from brim.service.api.openapi import problems

router = APIRouter(prefix="/api", tags=["access"])

MAX_ACTIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token to make."""

    name: Annotated[str, Length(1, 100), Doc("Whom it is for: letters, digits, dots, @, +, - and _.")]
    role: Annotated[Role, Doc("What it may do.")] = "viewer"
    days: Annotated[float | None, Range(high=MAX_DAYS, above=0), Doc("Days it is valid; null: until revoked.")] = None


_NEW_TOKEN = schema(NewToken)
_NEW_TOKEN["properties"]["name"]["pattern"] = NAME_PATTERN


@router.get("/me", responses=problems(), summary="Show who is asking")
async def show_me(by: By) -> shapes.ActorOut:
    """Name and role of the token or the session of this request."""
    return shapes.ActorOut(name=by.name, role=by.role)


@router.get("/tokens", responses=problems(507), summary="List named tokens")
def list_tokens(here: Here) -> shapes.TokensOut:
    """Oldest first, with people who have signed in; never the tokens themselves. For administrators."""
    return shapes.TokensOut(tokens=[_shown(each) for each in here.access.tokens.all()])


@router.post(
    "/tokens",
    status_code=201,
    responses=problems(400, 409, 413, 415, 422, 507),
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _NEW_TOKEN}}}},
    summary="Make a named token",
)
async def add_token(request: Request, here: Here) -> shapes.NewTokenOut:
    """The answer holds the token, which is not kept and cannot be shown again. For administrators."""
    asked = read(NewToken, await read_json(request), path="")
    made, text = await run_in_threadpool(here.access.tokens.add, asked.name, asked.role, asked.days)
    return shapes.NewTokenOut(**_shown(made).model_dump(), token=text)


@router.delete("/tokens/{name}", status_code=204, responses=problems(404, 507), summary="Revoke a named token")
def revoke_token(name: Annotated[str, Path(description="As the list gives it.")], here: Here) -> None:
    """The token and all sessions of it end at once. For administrators."""
    here.access.tokens.revoke(name)


@router.get("/actions", responses=problems(422), summary="What was done, and by whom")
def list_actions(here: Here, limit: Annotated[int, Query(ge=1, le=MAX_ACTIONS)] = 100) -> shapes.ActionsOut:
    """Newest first: every request that changes something, and sign-ins. For administrators."""
    return shapes.ActionsOut(actions=[shapes.ActionOut(**entry) for entry in here.actions.last(limit)])


def _shown(token: NamedToken) -> shapes.TokenOut:
    return shapes.TokenOut(
        name=token.name,
        role=token.role,
        source=token.source,
        created_at=shapes.time_text(token.created_at),
        expires_at=None if token.expires_at is None else shapes.time_text(token.expires_at),
    )
