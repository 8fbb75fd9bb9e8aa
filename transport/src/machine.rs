//! The identity of this machine.

use kvpool_types::HostId;
use std::io;

/// The boot id of the machine. Two processes with the same boot id may share memory.
///
/// # Errors
///
/// The error of reading `/proc/sys/kernel/random/boot_id`, or an error when it holds no UUID.
pub fn host_id() -> io::Result<HostId> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(PATH)
        .map_err(|error| io::Error::new(error.kind(), format!("{PATH}: {error}")))?;
    let no_uuid = || io::Error::other(format!("{PATH} holds no UUID: {text:?}"));
    parse(&text).ok_or_else(no_uuid)
}

/// Reads a UUID's 32 hex digits as one number.
fn parse(text: &str) -> Option<HostId> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(HostId)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_id_is_its_hex_digits() {
        assert_eq!(
            parse("0f4b6d1e-0000-4000-8000-0000000000ff\n"),
            Some(HostId(0x0f4b_6d1e_0000_4000_8000_0000_0000_00ff))
        );
        assert_eq!(parse("0f4b6d1e"), None);
        assert_eq!(parse(&"z".repeat(32)), None);
    }

    #[test]
    fn this_machine_has_a_host_id() {
        assert_ne!(host_id().unwrap(), HostId(0));
    }
}
