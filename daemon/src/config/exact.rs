//! Sizes as text that reads back as the very same number of bytes: for `#[serde(with = "...")]`.

use bytesize::ByteSize;

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

fn text(size: ByteSize) -> String {
    let fits = |(_, bits): &&(&str, u32)| size.0 > 0 && size.0.trailing_zeros() >= *bits;
    match UNITS.iter().find(fits) {
        Some((unit, bits)) => format!("{}{unit}", size.0 >> bits),
        None => format!("{}B", size.0),
    }
}

/// One size.
pub mod size {
    use super::{ByteSize, text};
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the size. Fails only where the serializer does.
    pub fn serialize<S: Serializer>(size: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&text(*size))
    }

    /// Reads a size, text or a number of bytes. Fails when it is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        ByteSize::deserialize(deserializer)
    }
}

/// A list of sizes.
pub mod sizes {
    use super::{ByteSize, text};
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the sizes. Fails only where the serializer does.
    pub fn serialize<S: Serializer>(sizes: &[ByteSize], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(sizes.iter().map(|size| text(*size)))
    }

    /// Reads sizes, each text or a number of bytes. Fails when one is neither.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<ByteSize>, D::Error> {
        Vec::deserialize(deserializer)
    }
}
