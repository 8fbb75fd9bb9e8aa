//! `kvctl ssd verify`.

use super::inspect::describe;
use super::target::{Content, Target};
use crate::context::Context;
use crate::{exit, output, progress};
use anyhow::bail;
use kvpool_disk::medium::{DATA_START, Found, HeaderWrong, Scan, Step, Wrong};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The reads between two updates of the progress bar, of 256 KiB each.
const STEPS: usize = 64;
/// The places of one kind of damage that are listed.
const LISTED: usize = 10;

/// Read a medium and verify the checksums of every extent
///
/// It writes nothing, and needs no right to write. It finds every extent on the medium, also of blocks that
/// the pool has removed since. Extents from before the medium was last formatted are counted and not verified. After a
/// node was killed, the extents that it wrote last may be damaged. A node never serves a damaged
/// extent.
///
/// Exits with code 5 if something is damaged or cannot be read.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ssd verify /var/lib/kvpool/ssd
  kvctl ssd verify /dev/nvme0n1p1 --output json | jq .damaged")]
pub(crate) struct Args {
    /// The disk, partition or file
    path: PathBuf,
}

/// The result of the verification of a medium.
#[derive(Debug, Default, Serialize)]
pub(super) struct Verification {
    path: String,
    medium: String,
    clean: bool,
    pub(super) intact_extents: u64,
    /// Bytes of blocks in them.
    pub(super) intact_bytes: u64,
    /// Extents of a former medium on the same device.
    pub(super) former_extents: u64,
    pub(super) damaged_places: u64,
    /// By kind.
    pub(super) damaged: BTreeMap<&'static str, Damage>,
}

/// Damage of one kind.
#[derive(Debug, Default, Serialize)]
pub(super) struct Damage {
    pub(super) places: u64,
    /// Offsets of the first damaged extents, in bytes from the start of the device.
    pub(super) first_offsets: Vec<u64>,
}

impl Verification {
    fn note(&mut self, found: &Found) {
        let wrong = match &found.verdict {
            Ok(()) => {
                self.intact_extents += 1;
                self.intact_bytes += found.header.as_ref().map_or(0, |header| header.length);
                return;
            }
            Err(Wrong::Header(HeaderWrong::OtherMedium)) => {
                self.former_extents += 1;
                return;
            }
            Err(wrong) => wrong,
        };
        self.damaged_places += 1;
        let damage = self.damaged.entry(wrong.kind()).or_default();
        damage.places += 1;
        if damage.first_offsets.len() < LISTED {
            damage.first_offsets.push(found.offset);
        }
    }
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let verification = verify(&args.path).await?;
    context.output.show(&verification, table)?;
    match verification.damaged_places {
        0 => Ok(()),
        damaged => Err(exit::DamagedMedium {
            path: verification.path,
            damaged,
        }
        .into()),
    }
}

pub(super) async fn verify(path: &Path) -> anyhow::Result<Verification> {
    let owned = path.to_owned();
    // The target keeps its lock until the end.
    let (_target, mut verification, mut scan, size) =
        tokio::task::spawn_blocking(move || begin(&owned)).await??;
    let bar = progress::bar(size >> 20, "MiB");
    bar.set_message("verifying");
    loop {
        // The command reads in parts, so that an interrupt ends it soon.
        let part = tokio::task::spawn_blocking(move || {
            let ended = proceed(&mut scan, &mut verification);
            (scan, verification, ended)
        });
        let ended;
        (scan, verification, ended) = part.await?;
        bar.set_position(scan.position() >> 20);
        if ended {
            break;
        }
    }
    bar.finish_and_clear();
    Ok(verification)
}

fn begin(path: &Path) -> anyhow::Result<(Target, Verification, Scan, u64)> {
    let target = Target::open_to_read(path)?;
    let medium = match target.content()? {
        Content::Medium(medium) => medium,
        Content::Blank => bail!("{} is blank: there is nothing to verify", path.display()),
        Content::Refused(refused) => bail!(
            "{} holds no medium that can be verified: {}",
            path.display(),
            describe(path, &refused)
        ),
    };
    let superblock = medium.superblock();
    let verification = Verification {
        path: path.display().to_string(),
        medium: superblock.medium.to_string(),
        clean: superblock.clean,
        ..Verification::default()
    };
    let Some(scan) = medium.scan(DATA_START..superblock.size) else {
        bail!("no memory is left for reads");
    };
    Ok((target, verification, scan, superblock.size))
}

/// Does the next [`STEPS`] reads. True at the end.
fn proceed(scan: &mut Scan, verification: &mut Verification) -> bool {
    let mut reads = 0;
    while reads < STEPS {
        match scan.step() {
            Step::Read => reads += 1,
            Step::Found(found) => {
                // A window that cannot be read took a request too.
                reads += usize::from(matches!(found.verdict, Err(Wrong::Io(_))));
                verification.note(&found);
            }
            Step::End => return true,
        }
    }
    false
}

fn table(found: &Verification) -> String {
    let mut facts = output::facts();
    facts.add_row(["path", &found.path]);
    facts.add_row(["medium", &found.medium]);
    let clean = match found.clean {
        true => "yes",
        false => "no: what was written last may be torn",
    };
    facts.add_row(["clean", clean]);
    facts.add_row(["intact extents", &output::count(found.intact_extents)]);
    facts.add_row([
        "bytes of blocks in them",
        &output::bytes(found.intact_bytes),
    ]);
    facts.add_row([
        "extents of a former medium",
        &output::count(found.former_extents),
    ]);
    facts.add_row(["damaged places", &output::count(found.damaged_places)]);
    if found.damaged.is_empty() {
        return facts.to_string();
    }
    let mut damage = output::table(["damage", "places", "first offsets"]);
    for (kind, one) in &found.damaged {
        let offsets: Vec<_> = one.first_offsets.iter().map(u64::to_string).collect();
        damage.add_row([
            (*kind).to_owned(),
            output::count(one.places),
            offsets.join(" "),
        ]);
    }
    format!("{facts}\n{damage}")
}
