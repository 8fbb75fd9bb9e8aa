//! The signatures of tokens, over ring. The TLS library of the workspace uses ring as well.

use jsonwebtoken::crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{Error, ErrorKind, Result, new_error};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind, EncodingKey};
use ring::signature::{
    self as signatures, Ed25519KeyPair, RsaPublicKeyComponents, UnparsedPublicKey,
};
use signature::{Signer, Verifier};
use std::sync::Once;

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: signer,
    verifier_factory: verifier,
    // Only the making of JWKs from other formats uses it.
    key_utils: KeyUtils::new_unimplemented(),
};

/// The length of an Ed25519 seed, and of a public key, in bytes.
pub(crate) const ED25519_BYTES: usize = 32;

/// Makes `jsonwebtoken` use ring. Each use of that crate here calls this first.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if PROVIDER.install_default().is_err() {
            tracing::warn!("tokens are verified with the library that this process chose before");
        }
    });
}

/// Whether tokens may be signed with `algorithm`: never with none, and never with a shared secret.
pub(crate) const fn is_allowed(algorithm: Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::EdDSA | Algorithm::ES256 | Algorithm::RS256
    )
}

fn signer(algorithm: &Algorithm, key: &EncodingKey) -> Result<Box<dyn JwtSigner>> {
    if *algorithm != Algorithm::EdDSA {
        return Err(unsupported());
    }
    let bytes = key.as_bytes();
    let halves = bytes.split_at_checked(ED25519_BYTES);
    let (seed, public) = halves.ok_or_else(|| new_error(ErrorKind::InvalidEddsaKey))?;
    let pair = Ed25519KeyPair::from_seed_and_public_key(seed, public)
        .map_err(|_| new_error(ErrorKind::InvalidEddsaKey))?;
    Ok(Box::new(EdSigner(pair)))
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>> {
    if !is_allowed(*algorithm) {
        return Err(unsupported());
    }
    let (algorithm, key) = (*algorithm, key.kind().clone());
    Ok(Box::new(RingVerifier { algorithm, key }))
}

fn unsupported() -> Error {
    new_error(ErrorKind::UnsupportedAlgorithm)
}

struct EdSigner(Ed25519KeyPair);

impl Signer<Vec<u8>> for EdSigner {
    fn try_sign(&self, message: &[u8]) -> std::result::Result<Vec<u8>, signature::Error> {
        Ok(self.0.sign(message).as_ref().to_vec())
    }
}

impl JwtSigner for EdSigner {
    fn algorithm(&self) -> Algorithm {
        Algorithm::EdDSA
    }
}

struct RingVerifier {
    algorithm: Algorithm,
    key: DecodingKeyKind,
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(
        &self,
        message: &[u8],
        signed: &Vec<u8>,
    ) -> std::result::Result<(), signature::Error> {
        let verified = match (self.algorithm, &self.key) {
            (Algorithm::EdDSA, DecodingKeyKind::SecretOrDer(key)) => {
                UnparsedPublicKey::new(&signatures::ED25519, key).verify(message, signed)
            }
            (Algorithm::ES256, DecodingKeyKind::SecretOrDer(key)) => {
                let kind = &signatures::ECDSA_P256_SHA256_FIXED;
                UnparsedPublicKey::new(kind, key).verify(message, signed)
            }
            (Algorithm::RS256, DecodingKeyKind::RsaModulusExponent { n, e }) => {
                let kind = &signatures::RSA_PKCS1_2048_8192_SHA256;
                RsaPublicKeyComponents { n, e }.verify(kind, message, signed)
            }
            _ => return Err(signature::Error::new()),
        };
        verified.map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}
