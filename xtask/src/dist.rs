//! `cargo xtask dist`: the files of a release, in `target/releases/NAME`.
//!
//! ```text
//!  portable   three programs for glibc 2.17 ──► glibc (the check)
//!     ├──► python    two wheels
//!     ├──► image     an OCI archive
//!     └──► archive   programs, manual, units, licences ──► NAME.tar.gz
//!  crates     what the programs are compiled from ──► sbom, licences
//!  chart      the Helm chart
//! ```
//!
//! If a tool is missing, its part of the release is left out. If a tool fails, the task ends. The last lines list the
//! parts that were made and the parts that were left out.

mod archive;
mod chart;
mod crates;
mod glibc;
mod image;
mod licences;
pub(crate) mod portable;
mod release;
mod sbom;

use crate::packages::Packages;
use crate::python;
use anyhow::{Result, bail};
use portable::Portable;
use release::Release;

/// The default of `--target`.
const TARGET: &str = "x86_64-unknown-linux-gnu";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build for x86_64-unknown-linux-gnu or aarch64-unknown-linux-gnu
    #[arg(long, default_value = TARGET)]
    target: String,
    /// Build with this profile of Cargo.toml; `release` compiles faster, for a trial of this task
    #[arg(long, default_value = "dist")]
    profile: String,
    /// Base image of the container image [default: one made of Debian's packages by mmdebstrap]
    #[arg(long, value_name = "IMAGE")]
    base: Option<String>,
    /// Leave out the wheels
    #[arg(long)]
    no_wheels: bool,
    /// Leave out the container image
    #[arg(long)]
    no_image: bool,
    /// Fail when anything is left out
    #[arg(long)]
    complete: bool,
    /// Install the Debian package python3-venv if it is missing
    #[arg(long)]
    install: bool,
}

/// Makes the files. Returns whether all was well.
pub(crate) fn run(args: &Args) -> Result<bool> {
    let Some(portable) =
        Portable::prepare(&args.target, &args.profile, Packages::asked(args.install))?
    else {
        return Ok(false);
    };
    let mut release = Release::begin(&portable.architecture)?;
    let Some(programs) = portable.programs()? else {
        return Ok(false);
    };
    if !glibc::check(&programs)? {
        return Ok(false);
    }
    let crates = crates::compiled_into(&crates::PROGRAMS, &portable.target)?;
    let bill = sbom::text(&crates, &release.stamp)?;
    let name = format!("{}.cdx.json", release.name);
    let sbom = release.add(&name, |path| Ok(std::fs::write(path, bill)?))?;
    let licences = release.add("THIRD-PARTY-LICENCES.txt", |path| {
        licences::write(&crates, path)
    })?;
    let archived = archive::write(&mut release, &programs, &[&sbom, &licences])?;
    if !archived {
        return Ok(false);
    }
    if args.no_wheels {
        release.leave_out("the wheels", "--no-wheels was given");
    } else if !wheels(&portable, &programs, &mut release)? {
        return Ok(false);
    }
    if args.no_image {
        release.leave_out("the image", "--no-image was given");
    } else {
        image::write(&mut release, &portable, &programs, args.base.as_deref())?;
    }
    chart::write(&mut release)?;
    release.checksums()?;
    release.print();
    if args.complete && !release.is_complete() {
        bail!("a part of the release is left out, and --complete was given");
    }
    Ok(true)
}

fn wheels(
    portable: &Portable,
    programs: &[std::path::PathBuf],
    release: &mut Release,
) -> Result<bool> {
    let Some(wheels) = python::portable_wheels(portable, programs)? else {
        return Ok(false);
    };
    for wheel in wheels {
        release.keep(&wheel)?;
    }
    Ok(true)
}
