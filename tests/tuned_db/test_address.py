"""Addresses of team databases: which are taken, what is made of them, and what of them is ever shown."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.errors import InvalidInput
from flashtune.tuned_db.backends.postgres.address import Address, read_address

SECRET = "Xq7Zv"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("postgresql://me@host/tuned", Address("host", None, "tuned", "me")),
        ("postgres://host:5433/tuned", Address("host", 5433, "tuned")),
        ("postgresql+psycopg://me:pw@10.0.0.1:1/a-b_c.d$", Address("10.0.0.1", 1, "a-b_c.d$", "me", "pw")),
        ("postgresql:///tuned", Address("", None, "tuned")),
        ("postgresql://:5433/tuned", Address("", 5433, "tuned")),
        ("postgresql://[::1]:5433/tuned", Address("::1", 5433, "tuned")),
        ("postgresql://me:a%40b%2F%3a%25@db.example.org./Datenbank_ä", Address(
            "db.example.org.", None, "Datenbank_ä", "me", "a@b/:%"
        )),
        ("postgresql://me:a:b#c;d e=f&g,h@host/tuned", Address("host", None, "tuned", "me", "a:b#c;d e=f&g,h")),
        ("postgresql://%6de@host/tune%64", Address("host", None, "tuned", "me")),
        (
            "postgresql:///tuned?host=/var/run/pg,b.example&port=5432,5433&sslmode=verify-full&options=-c%20a=b",
            Address("", None, "tuned", options=(
                ("host", "/var/run/pg,b.example"), ("port", "5432,5433"), ("sslmode", "verify-full"),
                ("options", "-c a=b"),
            )),
        ),
    ],
)  # fmt: skip
def test_an_address_is_read(text: str, address: Address) -> None:
    found = read_address(text)
    assert found == address
    assert (found.password, found.options) == (address.password, address.options)


names = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=15)
hosts = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,9}[a-z0-9])?(\.[a-z]{2,4}){0,2}", fullmatch=True)


@given(
    user=names, password=names, host=hosts, port=st.integers(1, 65535),
    database=st.from_regex(r"[\w$.-]{1,15}", fullmatch=True), extra=names,
)  # fmt: skip
def test_what_is_written_with_escapes_is_read_as_it_was(
    user: str, password: str, host: str, port: int, database: str, extra: str
) -> None:
    login, place = f"{quote(user, safe='')}:{quote(password, safe='')}", f"{host}:{port}/{quote(database)}"
    found = read_address(f"postgresql://{login}@{place}?application_name={quote(extra, safe='')}")
    assert found.parameters(connect_timeout="10") == {
        "host": host, "port": str(port), "user": user, "password": password, "dbname": database,
        "application_name": extra, "connect_timeout": "10",
    }  # fmt: skip
    assert str(found) == f"postgresql://{host}:{port}/{database}"


MISTAKES = [
    ("a second @", f"postgresql://tuner:p@{SECRET}@host/team", "more than one @"),
    ("a second @, no password", f"postgresql://tuner@{SECRET}@host/team", "more than one @"),
    ("an @ and a /", f"postgresql://tuner:p@{SECRET}/q@host/team", "more than one @"),
    ("a /", f"postgresql://tuner:p/{SECRET}@host/team", "more than one @"),
    ("a ?", f"postgresql://tuner:p?{SECRET}@host/team", "stands for the port"),
    ("a % that escapes nothing", f"postgresql://tuner:%{SECRET}@host/team", "a % that"),
    ("an escape that is no UTF-8", f"postgresql://tuner:{SECRET}%ff@host/team", "not UTF-8"),
    ("a null character", f"postgresql://tuner:{SECRET}\0@host/team", "null"),
    ("no @", f"postgresql://tuner:{SECRET}/team", "stands for the port"),
    ("another separator for @", f"postgresql://tuner:{SECRET}#host/team", "stands for the port"),
    ("a comma for @", f"postgresql://tuner,{SECRET},host/team", "stands for the host"),
    ("a space for @", f"postgresql://tuner {SECRET} host/team", "stands for the host"),
    ("escaped as a whole", f"postgresql://tuner%3A{SECRET}%40host%2Fteam", "stands for the host"),
    ("escaped up to the database", f"postgresql://tuner%3A{SECRET}%40host/team", "stands for the host"),
    ("& for ?", f"postgresql://tuner@host/team&password={SECRET}", "stands for the database"),
    ("; for ?", f"postgresql://tuner@host/team;password={SECRET}", "stands for the database"),
    ("an escaped ;", f"postgresql://tuner@host/team%3Bpassword%3D{SECRET}", "stands for the database"),
    ("a / for ?", f"postgresql://tuner@host/team/{SECRET}", "stands for the database"),
    ("a : for ?", f"postgresql://tuner@host/team:{SECRET}", "stands for the database"),
    ("a space for ?", f"postgresql://tuner@host/team {SECRET}", "stands for the database"),
    ("too many /", f"postgresql:///tuner:{SECRET}@host/team", "more than one @"),
    ("no database", f"postgresql://tuner:{SECRET}@host", "names no database"),
    ("an empty database", f"postgresql://tuner:{SECRET}@host/", "names no database"),
    ("a port that is none", f"postgresql://tuner@host:{SECRET}/team", "stands for the port"),
    ("a port too high", f"postgresql://tuner:{SECRET}@host:65536/team", "stands for the port"),
    ("a port 0", f"postgresql://tuner:{SECRET}@host:0/team", "stands for the port"),
    ("digits of another script", "postgresql://host:\u0661/team", "stands for the port"),
    ("a host with a line break", f"postgresql://host\n{SECRET}/team", "stands for the host"),
    ("a bracket", f"postgresql://[{SECRET}/team", "stands for the host"),
    ("a bracket that is no IPv6", f"postgresql://[{SECRET}]/team", "stands for the host"),
    ("a user too long", f"postgresql://{SECRET * 13}@host/team", "more than 63 bytes"),
    ("a database too long", f"postgresql://host/{'x' * 64}", "stands for the database"),
    ("?port", f"postgresql://host/team?port={SECRET}", "port behind the . is none"),
    ("?port of many", f"postgresql://host/team?port=1,{SECRET}", "port behind the . is none"),
    ("?port with a rest", "postgresql://host/team?port=5432x", "port behind the . is none"),
    ("?host", f"postgresql://h/team?host=tuner:{SECRET}@host", "host behind the . is none"),
    ("?hostaddr", f"postgresql://h/team?hostaddr=tuner@{SECRET}", "hostaddr behind the . is none"),
    ("an option without =", f"postgresql://host/team?{SECRET}", "option 1 .* form name=value"),
    ("an option that is no name", f"postgresql://host/team?sslmode=require&{SECRET}=1", "option 2 .* form name=value"),
    ("an option twice", f"postgresql://host/team?password={SECRET}&password=x", "option 2 .* was there already"),
    ("an empty option", "postgresql://host/team?sslmode=require&", "option 2 .* form name=value"),
    ("a user behind the ?", f"postgresql://host/team?user={SECRET}", "option 1 .* stand before"),
    ("a database behind the ?", f"postgresql://host/team?dbname={SECRET}", "option 1 .* stand before"),
    ("no scheme", f"tuner:{SECRET}@host/team", "begins with postgresql://"),
    ("another scheme", f"mysql://tuner:{SECRET}@host/team", "begins with postgresql://"),
    ("another driver", f"postgresql+asyncpg://tuner:{SECRET}@host/team", "begins with postgresql://"),
    ("a scheme that is the password", f"{SECRET.lower()}://tuner@host/team", "begins with postgresql://"),
    ("a password before the scheme", f"{SECRET}@postgresql://host/team", "begins with postgresql://"),
    ("a scheme with one /", f"postgresql:/tuner:{SECRET}@host/team", "begins with postgresql://"),
    ("what libpq takes besides", f"host=host password={SECRET}", "begins with postgresql://"),
    ("a file", f"{SECRET}.db", "begins with postgresql://"),
    ("nothing", "", "begins with postgresql://"),
]


@pytest.mark.parametrize(("text", "why"), [each[1:] for each in MISTAKES], ids=[each[0] for each in MISTAKES])
def test_an_address_with_a_mistake_is_refused_and_nothing_of_it_is_shown(text: str, why: str) -> None:
    """M7, M8"""
    with pytest.raises(InvalidInput, match=why) as caught:
        read_address(text)
    assert SECRET.lower() not in str(caught.value).lower()
    assert "such as postgresql://" in str(caught.value) or "needs the form postgresql://" in str(caught.value)


def test_what_is_shown_holds_neither_user_nor_password_nor_options() -> None:
    """M7: a password that is typed without a user stands in the user's place."""
    for text in (f"postgresql://{SECRET}@h:1/t", f"postgresql://u:{SECRET}@h:1/t?password={SECRET}&sslmode={SECRET}"):
        for shown in (str(read_address(text)), repr(read_address(text))):
            assert SECRET not in shown
            assert "postgresql://h:1/t" in shown
    assert str(read_address("postgresql://u@[::1]/t")) == "postgresql://[::1]/t"


@given(
    secret=names.filter(lambda text: re.search(r"\w", text) is not None),
    quotes=st.sampled_from(['"{}"', "'{}'", "{}, {}", "({})"]),
)
def test_a_message_loses_what_is_secret(secret: str, quotes: str) -> None:
    """M7: libpq quotes the values that it can't use."""
    written = quote(secret, safe="")
    message = quotes.format(secret, secret)
    for text in (f"postgresql://{written}@h/t", f"postgresql://u:{written}@h/t", f"postgresql://h/t?sslmode={written}"):
        assert read_address(text).cleaned(message) == quotes.format("***", "***")
    parts = read_address(f"postgresql://u:{SECRET}%22{SECRET}@h/t").cleaned(f"bad \\{SECRET}\\ and\n'{SECRET}'")
    assert parts == "bad \\***\\ and '***'"
