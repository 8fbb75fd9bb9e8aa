//! Newtypes for every id, offset, length and epoch, so that they cannot be confused.

use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $inner:ty, $format:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $format, self.0)
            }
        }

        impl From<$inner> for $name {
            fn from(raw: $inner) -> Self {
                Self(raw)
            }
        }
    };
}

macro_rules! wide_id {
    ($(#[$doc:meta])* $name:ident) => {
        id!($(#[$doc])* $name, u128, "{:032x}");

        impl $name {
            /// The 16 bytes of the id on a wire, little-endian.
            pub const fn to_bytes(self) -> [u8; 16] {
                self.0.to_le_bytes()
            }

            /// Reads the id from its 16 bytes; `None` for another length.
            pub fn from_slice(bytes: &[u8]) -> Option<Self> {
                Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
            }
        }
    };
}

wide_id!(
    /// One pool. The metadata store creates the id once; peers of different pools refuse each
    /// other.
    ClusterId
);
wide_id!(
    /// One life of a store node's process. A new incarnation has lost its DRAM blocks.
    Incarnation
);
wide_id!(
    /// One life of one client.
    ClientId
);
wide_id!(
    /// One disk, partition or file of blocks. A store node makes the id when it formats the medium.
    MediumId
);
wide_id!(
    /// One boot of one machine. Processes with the same host id may share memory.
    HostId
);
id!(
    /// The number of a term. It only grows.
    Epoch, u64, "{}"
);
id!(
    /// A segment. The master numbers segments and never reuses a number.
    SegmentId, u32, "{}"
);
id!(
    /// A namespace. The master numbers namespaces in order and never reuses a number.
    NamespaceId, u32, "{}"
);
id!(
    /// The permission to write one extent. Unique within its epoch.
    GrantId, u64, "{}"
);
id!(
    /// One committed value of one key. It equals the id of the put's grants, so it grows with every
    /// commit.
    Version, u64, "{}"
);
id!(
    /// A distance in bytes from the start of a segment.
    Offset, u64, "{}"
);
id!(
    /// A number of bytes.
    Length, u64, "{}"
);

impl SegmentId {
    /// The bit that marks segments on media. So the id alone tells whether a segment lies in memory or on a
    /// medium.
    pub const ON_MEDIUM: u32 = 1 << 31;

    /// True for a segment on a medium, false for a segment in memory.
    pub const fn is_on_medium(self) -> bool {
        self.0 & Self::ON_MEDIUM != 0
    }

    /// The id without the bit [`Self::ON_MEDIUM`]. Both kinds of segments share one sequence of numbers.
    pub const fn number(self) -> u32 {
        self.0 & !Self::ON_MEDIUM
    }

    /// The id of a segment on a medium with this number.
    pub const fn on_medium(number: u32) -> Self {
        Self(number | Self::ON_MEDIUM)
    }
}

impl Length {
    /// The longest block: 1 GiB.
    pub const MAX_BLOCK: Self = Self(1 << 30);

    /// The number of 64 KiB chunks that hold this many bytes.
    pub const fn chunks(self) -> u64 {
        self.0.div_ceil(crate::CHUNK)
    }

    /// The length as an index type, on the 64-bit machines that kvpool runs on.
    pub const fn as_usize(self) -> usize {
        const { assert!(usize::BITS == 64, "kvpool needs a 64-bit machine") };
        #[allow(
            clippy::cast_possible_truncation,
            reason = "usize has 64 bits, asserted above"
        )]
        {
            self.0 as usize
        }
    }
}

impl Offset {
    /// The offset as an index type, on the 64-bit machines that kvpool runs on.
    pub const fn as_usize(self) -> usize {
        Length(self.0).as_usize()
    }
}

/// The name of a store node, the same in all its incarnations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(pub String);

impl NodeName {
    /// Whether the name is safe in log lines, labels and tables: 1 to 255 letters, digits, `-`,
    /// `_`, `.` or `:`.
    pub fn is_sound(&self) -> bool {
        let fits = |c: u8| c.is_ascii_alphanumeric() || b"-_.:".contains(&c);
        (1..=255).contains(&self.0.len()) && self.0.bytes().all(fits)
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
