//! The container image, built by buildah from the programs that are built already.

use super::portable::Portable;
use super::release::Release;
use crate::cargo::{is_there, must_succeed, root, target_dir};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The name of the base that is made here.
const MADE: &str = "localhost/kvpool-base";

/// Writes the image as an OCI archive, or notes which tool or base is missing.
pub(super) fn write(
    release: &mut Release,
    portable: &Portable,
    programs: &[PathBuf],
    base: Option<&str>,
) -> Result<()> {
    match build(release, portable, programs, base)? {
        Ok(archive) => release.keep(&archive),
        Err(why) => {
            release.leave_out("the image", &why);
            Ok(())
        }
    }
}

fn build(
    release: &Release,
    portable: &Portable,
    programs: &[PathBuf],
    base: Option<&str>,
) -> Result<Result<PathBuf, String>> {
    if !is_there(Command::new("buildah").arg("--version"))? {
        return Ok(Err("buildah is missing (Debian: buildah)".into()));
    }
    let base = match base {
        Some(base) => base,
        None if !portable.is_of_this_machine() => {
            return Ok(Err(
                "for another architecture, name a base image with --base".into(),
            ));
        }
        None if !is_there(Command::new("mmdebstrap").arg("--version"))? => {
            let why = "mmdebstrap, which makes the base, is missing; install it or name a base with --base";
            return Ok(Err(why.into()));
        }
        None => {
            let mut make = Command::new(root().join("deploy/container/base.sh"));
            make.arg(MADE)
                .env("SOURCE_DATE_EPOCH", &release.stamp.seconds);
            must_succeed(&mut make)?;
            MADE
        }
    };
    // The context for buildah has the programs only, because the repository has gigabytes of build
    // output.
    let context = target_dir()?.join("releases/image");
    let bin = context.join("bin");
    std::fs::create_dir_all(&bin).context("cannot make the context of the image")?;
    for program in programs {
        copy(program, &bin)?;
    }
    let tag = format!("localhost/kvpool:{}", release.version);
    let mut bud = Command::new("buildah");
    bud.args(["bud", "--quiet", "--isolation", "chroot", "--tag", &tag]);
    bud.args([
        "--platform",
        portable.platform(),
        "--timestamp",
        &release.stamp.seconds,
    ]);
    let arguments = [
        ("BASE", base),
        ("PROGRAMS", "provided"),
        ("VERSION", &release.version),
        ("REVISION", &release.stamp.commit),
    ];
    for (name, value) in arguments {
        bud.args(["--build-arg", &format!("{name}={value}")]);
    }
    bud.arg("--file")
        .arg(root().join("Containerfile"))
        .arg(&context);
    must_succeed(&mut bud).context("cannot build the image")?;
    let archive = context.join(format!("{}-image.tar", release.name));
    // buildah would add to an existing archive.
    if archive.exists() {
        std::fs::remove_file(&archive)?;
    }
    let mut push = Command::new("buildah");
    push.args(["push", "--quiet", &tag]);
    push.arg(format!("oci-archive:{}:{tag}", archive.display()));
    must_succeed(&mut push).context("cannot write the image")?;
    Ok(Ok(archive))
}

fn copy(program: &Path, into: &Path) -> Result<()> {
    let name = program.file_name().context("a program has no name")?;
    std::fs::copy(program, into.join(name))
        .with_context(|| format!("cannot copy {}", program.display()))?;
    Ok(())
}
