//! The types that all crates share, and the codecs of everything on a wire.
//!
//! ```text
//!  namespace ─seed─► chain ─► key ──► wire::keys (packed, inside gRPC messages and frames)
//!  ids, extent ─► grant, read_right ► wire::data, wire::rdma (meta of data-port frames)
//!  code, checksum ─────────────────►   └─ wire::frame, wire::features (header), wire::incoming (reassembly)
//!  incarnation_secret, term_proof: proofs between nodes and masters; token: a client's proof
//!  hash64, key_strings: the key forms of other systems; causes: errors as people read them
//!  size: sizes as people write them
//! ```
//!
//! Everything here is pure: no I/O, no clock, no randomness, no unsafe code. This crate depends on
//! no other crate of the workspace.

#![forbid(unsafe_code)]

pub mod causes;
pub mod chain;
pub mod checksum;
pub mod code;
pub mod extent;
pub mod grant;
pub mod hash64;
pub mod ids;
pub mod incarnation_secret;
pub mod key;
pub mod key_strings;
pub mod medium;
pub mod namespace;
pub mod read_right;
pub mod size;
pub mod tenancy;
pub mod term_proof;
pub mod token;
pub mod wire;

pub use causes::Causes;
pub use chain::{Chain, chain_keys};
pub use checksum::{CHUNK, Checksum, ChecksumAlgorithm};
pub use code::Code;
pub use extent::Extent;
pub use grant::{Grant, GrantKey, GrantSigner};
pub use ids::{
    ClientId, ClusterId, Epoch, GrantId, HostId, Incarnation, Length, MediumId, NamespaceId,
    NodeName, Offset, SegmentId, Version,
};
pub use incarnation_secret::IncarnationSecret;
pub use key::{Key, KeyRef, ShownKey};
pub use namespace::Namespace;
pub use read_right::{ReadRight, ReadSigner};
pub use tenancy::{NamespaceSettings, Setting, SettingsError};
pub use term_proof::TermProver;
pub use token::Token;
