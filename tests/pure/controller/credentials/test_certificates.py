"""The coordinator's certificate: what it names, when it is made anew, and who still believes it then."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from surefoot_operator.controller.credentials import certificates
from surefoot_operator.controller.credentials.certificates import (
    AUTHORITY_DAYS,
    CA,
    CA_KEY,
    CERTIFICATE,
    CERTIFICATE_DAYS,
    KEY,
    server_names,
)

NAMES = ("surefoot-coordinator.system.svc", "10.0.0.7", "fd00::7")
NOW = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
DAY = 86400.0


def certificate(content: certificates.Content, entry: str = CERTIFICATE) -> x509.Certificate:
    return x509.load_pem_x509_certificate(content[entry])


def test_a_first_one_names_all_and_is_signed_by_its_own_authority() -> None:
    made = certificates.issue_certificate({}, NAMES, NOW)
    found, authority = certificate(made), certificate(made, CA)
    assert certificates.names_of(found) == set(NAMES)
    found.verify_directly_issued_by(authority)
    assert isinstance(found.public_key(), ec.EllipticCurvePublicKey)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert b"PRIVATE KEY" in made[KEY]
    assert certificates.has_authority_key(made)
    assert certificates.renewal_reason(made, NAMES, NOW) == ""


@pytest.mark.parametrize(
    ("days", "why"),
    [
        (0, ""),
        (CERTIFICATE_DAYS * 0.6, ""),
        (CERTIFICATE_DAYS * 0.7, "less than a third of its validity is left"),
        (CERTIFICATE_DAYS + 1, "less than a third of its validity is left"),
        (AUTHORITY_DAYS + 1, "less than a third of its validity is left"),
    ],
)
def test_it_is_made_anew_in_time(days: float, why: str) -> None:
    made = certificates.issue_certificate({}, NAMES, NOW)
    assert certificates.renewal_reason(made, NAMES, NOW + days * DAY) == why


def test_a_renewed_one_is_believed_by_who_knew_the_first() -> None:
    first = certificates.issue_certificate({}, NAMES, NOW)
    second = certificates.issue_certificate(first, NAMES, NOW + 300 * DAY)
    assert second[CA] == first[CA]
    assert second[CERTIFICATE] != first[CERTIFICATE]
    assert second[KEY] != first[KEY]
    certificate(second).verify_directly_issued_by(certificate(first, CA))
    assert certificates.renewal_reason(second, NAMES, NOW + 300 * DAY) == ""


def test_an_old_authority_is_followed_by_another_and_still_told_beside_it() -> None:
    first = certificates.issue_certificate({}, NAMES, NOW)
    late = NOW + AUTHORITY_DAYS * 0.8 * DAY
    renewed = certificates.issue_certificate(first, NAMES, NOW + AUTHORITY_DAYS * 0.6 * DAY)
    assert "authority" not in certificates.renewal_reason(renewed, NAMES, NOW + AUTHORITY_DAYS * 0.6 * DAY)
    second = certificates.issue_certificate(first, NAMES, late)
    newer, older = x509.load_pem_x509_certificates(second[CA])
    assert older == certificate(first, CA)
    certificate(second).verify_directly_issued_by(newer)
    assert certificates.renewal_reason(second, NAMES, late) == ""
    third = certificates.issue_certificate(second, NAMES, NOW + AUTHORITY_DAYS * 1.1 * DAY)
    assert x509.load_pem_x509_certificates(third[CA])[0] == newer


def test_a_new_name_and_a_damaged_one_are_reasons() -> None:
    made = certificates.issue_certificate({}, NAMES, NOW)
    assert certificates.renewal_reason(made, (*NAMES, "other.svc"), NOW) == "it is not valid for other.svc"
    assert "cannot be read" in certificates.renewal_reason({**made, CERTIFICATE: b"x"}, NAMES, NOW)
    assert "cannot be read" in certificates.renewal_reason({}, NAMES, NOW)
    again = certificates.issue_certificate({**made, CERTIFICATE: b"x"}, NAMES, NOW)
    assert again[CA] == made[CA]


def test_a_damaged_authority_is_replaced() -> None:
    made = certificates.issue_certificate({CA: b"x", CA_KEY: b"y"}, NAMES, NOW)
    certificate(made).verify_directly_issued_by(certificate(made, CA))


@pytest.mark.parametrize(
    ("url", "names"),
    [
        (
            "wss://surefoot-coordinator.system.svc:8443/v1/agents",
            ("surefoot-coordinator.system.svc", "surefoot-coordinator.system.svc.cluster.local"),
        ),
        (
            "wss://10.1.2.3:8443/v1/agents",
            ("10.1.2.3", "surefoot-coordinator.system.svc", "surefoot-coordinator.system.svc.cluster.local"),
        ),
        (
            "wss://[fd00::1]:8443/v1/agents",
            ("fd00::1", "surefoot-coordinator.system.svc", "surefoot-coordinator.system.svc.cluster.local"),
        ),
        (
            "wss://mine.system.svc:8443/v1/agents",
            (
                "mine.system.svc",
                "mine.system.svc.cluster.local",
                "surefoot-coordinator.system.svc",
                "surefoot-coordinator.system.svc.cluster.local",
            ),
        ),
    ],
)
def test_every_name_that_an_agent_may_use_is_named(url: str, names: tuple[str, ...]) -> None:
    assert server_names(url, "system") == names
