//! The words of kvpool as types: keys and chains, ids, extents, grants, epochs, stable codes and
//! the codecs of what crosses a wire.
//!
//! Everything here is pure: no I/O, no clock, no randomness, no unsafe code. Every other crate
//! depends on this one, and this one on none of them.

#![forbid(unsafe_code)]

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
pub mod namespace;
pub mod term_proof;
pub mod token;
pub mod wire;

pub use chain::{Chain, chain_keys};
pub use checksum::{CHUNK, Checksum, ChecksumAlgorithm};
pub use code::Code;
pub use extent::Extent;
pub use grant::{Grant, GrantKey, GrantSigner};
pub use ids::{
    ClientId, ClusterId, Epoch, GrantId, HostId, Incarnation, Length, NamespaceId, NodeName,
    Offset, SegmentId, Version,
};
pub use incarnation_secret::IncarnationSecret;
pub use key::{Key, KeyRef};
pub use namespace::Namespace;
pub use term_proof::TermProver;
pub use token::Token;
