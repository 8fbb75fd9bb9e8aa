//! The public keys of issuers: a JWKS file.

use crate::backend;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::Deserialize;

/// The most keys of a set.
const MOST_KEYS: usize = 64;

/// One public key.
pub(crate) struct PublicKey {
    id: Option<String>,
    pub(crate) algorithm: Algorithm,
    pub(crate) key: DecodingKey,
}

/// The keys of a JWKS.
pub(crate) struct Keys(Vec<PublicKey>);

#[derive(Deserialize)]
struct Listed {
    keys: Vec<serde_json::Value>,
}

impl Keys {
    /// Reads a JWKS. Keys of unsupported types are skipped, and shared secrets always are. The result may be empty:
    /// the operator has then removed the last key.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        backend::install();
        let listed: Listed =
            serde_json::from_str(text).map_err(|error| format!("it is no JWKS: {error}"))?;
        if listed.keys.len() > MOST_KEYS {
            return Err(format!("it has more than {MOST_KEYS} keys"));
        }
        let mut keys = Vec::new();
        for listed in listed.keys {
            match serde_json::from_value::<Jwk>(listed) {
                Ok(jwk) => keys.extend(public_key(&jwk)),
                Err(error) => tracing::warn!(%error, "a key of the JWKS cannot be read, ignored"),
            }
        }
        Ok(Self(keys))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The keys that may have signed a token with this header. A token that names a key is judged by
    /// the keys of this name only.
    pub(crate) fn candidates(
        &self,
        id: Option<&str>,
        algorithm: Algorithm,
    ) -> impl Iterator<Item = &PublicKey> {
        self.0.iter().filter(move |key| {
            key.algorithm == algorithm && (id.is_none() || id == key.id.as_deref())
        })
    }
}

fn public_key(jwk: &Jwk) -> Option<PublicKey> {
    let algorithm = match &jwk.algorithm {
        AlgorithmParameters::OctetKeyPair(pair) if pair.curve == EllipticCurve::Ed25519 => {
            Algorithm::EdDSA
        }
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
            Algorithm::ES256
        }
        AlgorithmParameters::RSA(_) => Algorithm::RS256,
        _ => return None,
    };
    let own = match algorithm {
        Algorithm::ES256 => KeyAlgorithm::ES256,
        Algorithm::RS256 => KeyAlgorithm::RS256,
        _ => KeyAlgorithm::EdDSA,
    };
    if jwk.common.key_algorithm.is_some_and(|named| named != own) {
        return None;
    }
    if !matches!(
        jwk.common.public_key_use,
        None | Some(PublicKeyUse::Signature)
    ) {
        return None;
    }
    Some(PublicKey {
        id: jwk.common.key_id.clone(),
        algorithm,
        key: DecodingKey::from_jwk(jwk).ok()?,
    })
}
