//! The sizes of options.

use bytesize::ByteSize;
use kvpool_types::size::{BadSize, parse};

/// Reads the size of an option.
///
/// # Errors
///
/// The text is not a size, or no count of bytes holds it.
pub fn parse_size(text: &str) -> Result<ByteSize, BadSize> {
    parse(text).map(ByteSize)
}
