//! Makes a device blank.

use super::DATA_START;
use super::copies::perform;
use super::error::MediumRefused;
use crate::{Arena, Engine, Op};
use kvpool_types::Length;
use std::sync::Arc;

/// Overwrites the superblocks and the space behind them with zeros, and flushes. The device is then
/// [`Blank`](super::Opened::Blank), and its bad ranges are forgotten. Blocks on the device.
///
/// The extents of the former medium stay on the device. A later medium does not accept them, because their
/// headers have the id of the former medium.
pub fn erase(engine: &dyn Engine, arena: &Arc<Arena>) -> Result<(), MediumRefused> {
    super::usable(engine)?;
    let room = arena.take(Length(DATA_START).as_usize());
    let mut zeros = room.ok_or(MediumRefused::NoRoom)?;
    zeros.fill(0);
    let (_, written) = perform(engine, Op::Write(zeros), 0, None);
    written.map_err(MediumRefused::Io)?;
    let (_, flushed) = perform(engine, Op::Flush, 0, None);
    flushed.map_err(MediumRefused::Io)
}
