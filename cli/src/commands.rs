//! The commands, one a file.

pub(crate) mod bench;
pub(crate) mod cluster;
pub(crate) mod demo;
pub(crate) mod describe;
pub(crate) mod doctor;
pub(crate) mod exist;
pub(crate) mod get;
pub(crate) mod ls;
pub(crate) mod namespace;
pub(crate) mod node;
pub(crate) mod put;
pub(crate) mod replay;
pub(crate) mod replica;
pub(crate) mod rm;
pub(crate) mod ssd;
pub(crate) mod status;
pub(crate) mod token;
pub(crate) mod top;
