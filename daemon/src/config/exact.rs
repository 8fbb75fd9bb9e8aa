//! Sizes as text that reads back as the very same number of bytes: for `#[serde(with = "...")]`.

use bytesize::ByteSize;
use kvpool_types::size::parse;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;

const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];

fn text(size: ByteSize) -> String {
    let fits = |(_, bits): &&(&str, u32)| size.0 > 0 && size.0.trailing_zeros() >= *bits;
    match UNITS.iter().find(fits) {
        Some((unit, bits)) => format!("{}{unit}", size.0 >> bits),
        None => format!("{}B", size.0),
    }
}

/// A size that is read from text or from a number, and never rounded to another one without a word.
struct Exact(ByteSize);

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl Visitor<'_> for Reader {
    type Value = Exact;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a size such as 1GiB, or a number of bytes")
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<Exact, E> {
        Ok(Exact(ByteSize(bytes)))
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<Exact, E> {
        let bytes = u64::try_from(bytes);
        bytes
            .map(|bytes| Exact(ByteSize(bytes)))
            .map_err(|_| E::custom("a size is not negative"))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Exact, E> {
        let bytes = parse(text).map_err(E::custom)?;
        Ok(Exact(ByteSize(bytes)))
    }
}

/// One size.
pub mod size {
    use super::{ByteSize, Exact, text};
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the size. Fails only where the serializer does.
    pub fn serialize<S: Serializer>(size: &ByteSize, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&text(*size))
    }

    /// Reads a size, text or a number of bytes. Fails when it is neither, or no count of bytes.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteSize, D::Error> {
        Exact::deserialize(deserializer).map(|Exact(size)| size)
    }
}

/// A list of sizes.
pub mod sizes {
    use super::{ByteSize, Exact, text};
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the sizes. Fails only where the serializer does.
    pub fn serialize<S: Serializer>(sizes: &[ByteSize], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(sizes.iter().map(|size| text(*size)))
    }

    /// Reads sizes, each text or a number of bytes. Fails when one is neither, or no count of bytes.
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<ByteSize>, D::Error> {
        let sizes = Vec::<Exact>::deserialize(deserializer)?;
        Ok(sizes.into_iter().map(|Exact(size)| size).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    #[derive(Debug, Serialize, Deserialize, PartialEq)]
    struct Sizes {
        #[serde(with = "size")]
        one: ByteSize,
        #[serde(with = "sizes")]
        several: Vec<ByteSize>,
    }

    fn read(one: &str, several: &str) -> Result<Sizes, String> {
        let text = format!("one = {one}\nseveral = [{several}]\n");
        toml::from_str(&text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_size_that_no_count_of_bytes_holds_is_refused_with_its_value() {
        let sizes = Sizes {
            one: ByteSize(1536),
            several: vec![ByteSize(4096), ByteSize::gib(1)],
        };
        assert_eq!(read("'1.5KiB'", "4096, '1GiB'"), Ok(sizes));
        for value in ["99999EiB", "0.1B"] {
            let quoted = format!("'{value}'");
            let refused = read(&quoted, "").unwrap_err();
            assert!(refused.contains(value), "{refused}");
            let refused = read("1", &format!("'1GiB', {quoted}")).unwrap_err();
            assert!(refused.contains(value), "{refused}");
        }
        assert!(read("-1", "").is_err());
    }
}
