//! Compiles the workspace for ARM servers.

use crate::cargo::{cargo, rustc_libraries, succeeds};
use crate::tally::Tally;
use anyhow::Result;

const TARGET: &str = "aarch64-unknown-linux-gnu";

/// Runs `cargo check` for the target if its standard library is installed; otherwise counts a skip.
pub(super) fn check(tally: &mut Tally) -> Result<()> {
    if cfg!(target_arch = "aarch64") {
        // Clippy has compiled the workspace for this target.
        return Ok(());
    }
    if !rustc_libraries(TARGET)?.is_dir() {
        let reason = format!("its standard library is missing (`rustup target add {TARGET}`)");
        tally.skip("the check for aarch64", &reason);
        return Ok(());
    }
    let checked = succeeds(&mut cargo(&["check", "--workspace", "--target", TARGET]))?;
    tally.checked("the check for aarch64", checked);
    Ok(())
}
