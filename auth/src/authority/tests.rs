//! Tokens that the authority accepts or refuses, and when.

use super::*;
use crate::issue::{NewToken, SigningKey, publish};
use crate::{Role, Roles, now};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kvpool_types::Code;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::time::Instant;
use tempfile::TempDir;

const POLICY: &str = "[[rule]]\nsubject = \"*\"\nroles = [\"writer\"]\nnamespaces = [\"a\"]\n";
const ISSUER: &str = "https://issuer";

struct Fixture {
    directory: TempDir,
    key: SigningKey,
    authority: Arc<Authority>,
}

fn settings(directory: &TempDir) -> AuthSettings {
    AuthSettings {
        jwks: directory.path().join("jwks.json"),
        issuer: ISSUER.to_owned(),
        audience: AuthSettings::DEFAULT_AUDIENCE.to_owned(),
        policy: directory.path().join("policy.toml"),
    }
}

fn fixture() -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let key = SigningKey::generate().unwrap();
    let settings = settings(&directory);
    publish(&key, &settings.jwks).unwrap();
    std::fs::write(&settings.policy, POLICY).unwrap();
    let authority = Authority::open(settings).unwrap();
    Fixture {
        directory,
        key,
        authority,
    }
}

fn claims() -> Value {
    json!({ "sub": "w", "iss": ISSUER, "aud": "kvpool", "exp": now() + 60 })
}

fn with(name: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[name] = value;
    claims
}

fn without(name: &str) -> Value {
    let mut claims = claims();
    claims.as_object_mut().unwrap().remove(name);
    claims
}

#[test]
fn a_token_gives_the_roles_of_the_policy() {
    let it = fixture();
    let token = NewToken {
        subject: "w",
        issuer: ISSUER,
        audience: "kvpool",
        begins: now(),
        expires: now() + 60,
    };
    let identity = it.authority.judge(&it.key.sign(&token).unwrap()).unwrap();
    assert_eq!(identity.subject(), "w");
    assert_eq!(identity.roles_in("a"), Roles::of(&[Role::Writer]));
    assert!(identity.roles_in("b").is_empty());
}

#[test]
fn each_fault_of_a_token_has_its_reason() {
    let it = fixture();
    let judge = |claims: &Value| {
        let token = it.key.sign_claims(claims).unwrap();
        it.authority.judge(&token).map(drop)
    };
    assert_eq!(judge(&claims()), Ok(()));
    assert_eq!(judge(&with("aud", json!(["x", "kvpool"]))), Ok(()));
    assert_eq!(it.authority.judge("").unwrap_err(), TokenError::Missing);
    let expired = judge(&with("exp", json!(now() - 31))).unwrap_err();
    assert_eq!(expired.code(), Code::TokenExpired);
    // The leeway is for clocks that differ.
    assert_eq!(judge(&with("exp", json!(now() - 10))), Ok(()));
    assert_eq!(
        judge(&with("nbf", json!(now() + 60))),
        Err(TokenError::NotYet)
    );
    for (bad, wanted) in [
        (with("aud", json!("x")), "another audience"),
        (with("iss", json!("x")), "another issuer"),
        (with("exp", json!("4102444800")), "exp"),
        (with("nbf", json!("0")), "claims"),
        (without("exp"), "exp"),
        (without("aud"), "aud"),
        (without("iss"), "iss"),
        (without("sub"), "sub"),
    ] {
        let error = judge(&bad).unwrap_err();
        assert_eq!(error.code(), Code::Unauthenticated, "{bad}");
        let said = error.to_string();
        assert!(
            said.contains(wanted) || said.contains("claims"),
            "{bad}: {said}"
        );
    }
}

#[test]
fn only_signatures_of_known_keys_count() {
    let it = fixture();
    let good = it.key.sign_claims(&claims()).unwrap();
    let other = SigningKey::generate().unwrap();
    let foreign = other.sign_claims(&claims()).unwrap();
    assert_eq!(
        it.authority.judge(&foreign).unwrap_err(),
        TokenError::Signature
    );
    let parts: Vec<&str> = good.split('.').collect();
    let head = |header: Value| URL_SAFE_NO_PAD.encode(header.to_string());
    let kid = it.key.id();
    for (token, wanted) in [
        // No signature, in the ways that have fooled verifiers.
        (
            format!("{}.{}.", head(json!({"alg": "none"})), parts[1]),
            TokenError::Algorithm,
        ),
        (
            format!("{}.{}.", head(json!({"alg": "None", "kid": kid})), parts[1]),
            TokenError::Algorithm,
        ),
        (format!("{}.{}.", parts[0], parts[1]), TokenError::Signature),
        // A public key used as a shared secret.
        (
            format!(
                "{}.{}.{}",
                head(json!({"alg": "HS256", "kid": kid})),
                parts[1],
                parts[2]
            ),
            TokenError::Algorithm,
        ),
        // Another algorithm than the key's.
        (
            format!(
                "{}.{}.{}",
                head(json!({"alg": "ES256", "kid": kid})),
                parts[1],
                parts[2]
            ),
            TokenError::Signature,
        ),
        // The name of another key.
        (
            format!(
                "{}.{}.{}",
                head(json!({"alg": "EdDSA", "kid": "x"})),
                parts[1],
                parts[2]
            ),
            TokenError::Signature,
        ),
        // Other claims under the same signature.
        (
            format!(
                "{}.{}.{}",
                parts[0],
                head(with("sub", json!("root"))),
                parts[2]
            ),
            TokenError::Signature,
        ),
    ] {
        assert_eq!(it.authority.judge(&token).unwrap_err(), wanted, "{token}");
    }
    let critical = head(json!({"alg": "EdDSA", "kid": kid, "crit": ["exp"]}));
    for malformed in [
        "x",
        "a.b",
        "a.b.c",
        "a.b.c.d",
        &"x".repeat(9000),
        &format!("{critical}.{}.{}", parts[1], parts[2]),
    ] {
        let error = it.authority.judge(malformed).unwrap_err();
        assert!(
            matches!(error, TokenError::Malformed(_)),
            "{malformed}: {error}"
        );
    }
}

#[test]
fn every_mutation_of_a_token_is_refused() {
    let it = fixture();
    let good = it.key.sign_claims(&claims()).unwrap();
    it.authority.judge(&good).unwrap();
    let mut refused = 0;
    for at in 0..good.len() {
        for mask in [1, 2, 4, 32] {
            let mut bytes = good.clone().into_bytes();
            bytes[at] ^= mask;
            let Ok(mutated) = String::from_utf8(bytes) else {
                continue;
            };
            // The last character of a part has bits that decode to nothing. A change of these bits is refused as
            // well.
            assert!(it.authority.judge(&mutated).is_err(), "byte {at} ^ {mask}");
            refused += 1;
        }
    }
    assert!(refused > 500, "{refused}");
}

#[test]
fn es256_and_rs256_are_verified_too() {
    let it = fixture();
    let random = SystemRandom::new();
    let kind = &ECDSA_P256_SHA256_FIXED_SIGNING;
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
    let pair = EcdsaKeyPair::from_pkcs8(kind, pkcs8.as_ref(), &random).unwrap();
    let point = pair.public_key().as_ref();
    let encoded = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let message = format!(
        "{}.{}",
        encoded(br#"{"alg":"ES256"}"#),
        encoded(claims().to_string().as_bytes())
    );
    let signed = pair.sign(&random, message.as_bytes()).unwrap();
    let token = format!("{message}.{}", encoded(signed.as_ref()));
    let mut set: Value =
        serde_json::from_str(include_str!("../../testdata/rs256.jwks.json")).unwrap();
    set["keys"].as_array_mut().unwrap().extend([
        json!({"kty": "EC", "crv": "P-256", "x": encoded(&point[1..33]), "y": encoded(&point[33..])}),
        json!({"kty": "oct", "k": encoded(b"secret")}),
        json!({"kty": "none of this"}),
    ]);
    std::fs::write(&it.authority.settings.jwks, set.to_string()).unwrap();
    assert!(it.authority.look().unwrap());
    assert_eq!(it.authority.judge(&token).unwrap().subject(), "w");
    let rsa = include_str!("../../testdata/rs256.token").trim();
    let identity = it.authority.judge(rsa).unwrap();
    assert_eq!(identity.subject(), "system:serviceaccount:a:w");
    let shared = "eyJhbGciOiJIUzI1NiJ9.e30.AAAA";
    assert_eq!(
        it.authority.judge(shared).unwrap_err(),
        TokenError::Algorithm
    );
}

#[test]
fn changed_files_are_believed_within_two_seconds_and_bad_ones_change_nothing() {
    let it = fixture();
    let token = it.key.sign_claims(&claims()).unwrap();
    it.authority.judge(&token).unwrap();
    let before = it.authority.generation();
    let jwks = &it.authority.settings.jwks;
    std::fs::write(jwks, "{").unwrap();
    assert!(it.authority.look().is_err());
    let said = it.authority.problem().unwrap();
    assert!(said.contains("jwks.json: it is no JWKS"), "{said}");
    it.authority.judge(&token).unwrap();
    assert_eq!(it.authority.generation(), before);
    // The key is taken out: the token that was remembered is refused.
    let other = SigningKey::generate().unwrap();
    std::fs::remove_file(jwks).unwrap();
    publish(&other, jwks).unwrap();
    let begun = Instant::now();
    while it.authority.generation() == before {
        assert!(begun.elapsed() < 5 * LOOK, "the change is not noticed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(
        it.authority.judge(&token).unwrap_err(),
        TokenError::Signature
    );
    it.authority
        .judge(&other.sign_claims(&claims()).unwrap())
        .unwrap();
}

#[test]
fn the_last_key_can_be_taken_away_and_a_missing_file_takes_none_away() {
    let it = fixture();
    let token = it.key.sign_claims(&claims()).unwrap();
    it.authority.judge(&token).unwrap();
    let jwks = &it.authority.settings.jwks;
    let published = std::fs::read_to_string(jwks).unwrap();
    let refusal = || it.authority.judge(&token).map(drop);
    for (text, wanted) in [
        (r#"{"keys":[]}"#, Err(TokenError::Signature)),
        (published.as_str(), Ok(())),
        (
            r#"{"keys":[{"kty":"oct","k":"AAAA"}]}"#,
            Err(TokenError::Signature),
        ),
        (published.as_str(), Ok(())),
    ] {
        // In one step, because the authority's own thread reads the file too.
        let next = jwks.with_extension("next");
        std::fs::write(&next, text).unwrap();
        std::fs::rename(&next, jwks).unwrap();
        it.authority.look().unwrap();
        assert_eq!(refusal(), wanted, "{text}");
        assert_eq!(it.authority.problem().is_some(), wanted.is_err(), "{text}");
    }
    for text in ["", "[]", r#"{"key":[]}"#] {
        std::fs::write(jwks, text).unwrap();
        assert!(it.authority.look().is_err(), "{text}");
        assert_eq!(refusal(), Ok(()), "{text}");
    }
    std::fs::remove_file(jwks).unwrap();
    assert!(it.authority.look().is_err());
    assert_eq!(refusal(), Ok(()));
}

#[test]
fn a_policy_without_a_rule_takes_no_right_away_and_no_daemon_starts_on_it() {
    let it = fixture();
    let token = it.key.sign_claims(&claims()).unwrap();
    let before = it.authority.generation();
    let policy = &it.authority.settings.policy;
    for text in ["", "# The rules follow.\n", "rule = []\n"] {
        std::fs::write(policy, text).unwrap();
        assert!(it.authority.look().is_err(), "{text:?}");
        let said = it.authority.problem().unwrap();
        assert!(said.contains("policy.toml: it has no rule"), "{said}");
        let identity = it.authority.judge(&token).unwrap();
        assert_eq!(identity.roles_in("a"), Roles::of(&[Role::Writer]));
        let refused = Authority::open(settings(&it.directory)).unwrap_err();
        assert!(refused.to_string().contains("it has no rule"), "{refused}");
    }
    assert_eq!(it.authority.generation(), before);
    std::fs::write(policy, POLICY).unwrap();
    assert!(!it.authority.look().unwrap());
    assert_eq!(it.authority.problem(), None);
}

#[test]
fn files_that_everybody_can_write_are_refused() {
    let it = fixture();
    let settings = settings(&it.directory);
    let open = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(&settings.policy, open(0o646)).unwrap();
    let error = Authority::open(settings.clone()).unwrap_err().to_string();
    assert!(error.contains("chmod o-w"), "{error}");
    std::fs::set_permissions(&settings.policy, open(0o644)).unwrap();
    std::fs::write(&settings.jwks, r#"{"keys":[{"kty":"oct","k":"AAAA"}]}"#).unwrap();
    let error = Authority::open(settings).unwrap_err().to_string();
    assert!(error.contains("it has no key"), "{error}");
}

#[test]
fn a_signing_key_is_kept_from_others_and_shown_to_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    let key = SigningKey::generate().unwrap();
    key.save(&path).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let loaded = SigningKey::load(&path).unwrap();
    assert_eq!(loaded.public_jwk(), key.public_jwk());
    let text = std::fs::read_to_string(&path).unwrap();
    let secret: Value = serde_json::from_str(&text).unwrap();
    assert!(!format!("{key:?}").contains(secret["d"].as_str().unwrap()));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    assert!(SigningKey::load(&path).is_err());
}
