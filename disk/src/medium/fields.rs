//! Little-endian fields of the medium's own structures, and the CRC that ends each structure. Reading never
//! panics: a field beyond the end is `None`.

use kvpool_types::Checksum;

/// The bytes of the CRC at the end of a structure.
pub(super) const CRC: usize = 8;

/// The CRC-64/NVME of `bytes`.
pub(super) fn checksum(bytes: &[u8]) -> Checksum {
    Checksum(crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes))
}

/// Reads fields one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self) -> Option<u128> {
        self.bytes().map(u128::from_le_bytes)
    }
}

/// Pads `fields` with zeros to `size` bytes. The last eight bytes are the CRC of all bytes before.
pub(super) fn close(mut fields: Vec<u8>, size: usize) -> Vec<u8> {
    debug_assert!(fields.len() + CRC <= size, "invariant: the fields fit");
    fields.resize(size.saturating_sub(CRC), 0);
    let crc = checksum(&fields);
    fields.extend_from_slice(&crc.0.to_le_bytes());
    fields
}

/// The bytes before the CRC; `None` if the CRC does not match.
pub(super) fn open(structure: &[u8]) -> Option<&[u8]> {
    let (fields, crc) = structure.split_last_chunk::<CRC>()?;
    (checksum(fields).0 == u64::from_le_bytes(*crc)).then_some(fields)
}
