//! Running cargo and other programs in the repository's root.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{OnceLock, mpsc};
use std::time::Instant;

/// The packages whose binaries make a pool: `kvmaster`, `kvstore-node` and `kvctl`.
pub(crate) const DAEMONS: [&str; 6] = [
    "-p",
    "kvpool-master",
    "-p",
    "kvpool-store-node",
    "-p",
    "kvpool-cli",
];

/// The flags with which the daemons export traces.
pub(crate) const OTLP: [&str; 2] = [
    "--features",
    "kvpool-master/otlp,kvpool-store-node/otlp,kvpool-cli/otlp",
];

/// The daemons, and all other tested targets. Cargo unifies features over the packages that it builds. So a build of
/// one package and a build of the workspace would compile the dependencies twice.
pub(crate) const EVERYTHING: [&str; 3] = ["--workspace", "--bins", "--tests"];

/// The compiler of all later builds, if [`lint_in_builds`] was called.
static LINTER: OnceLock<PathBuf> = OnceLock::new();

/// From now on every build of the workspace's crates is also a run of clippy. Returns false if clippy is missing.
///
/// `cargo clippy` reads all crates, also the libraries, and leaves nothing that a build could use. Its compiler with
/// lints can build too, though with less optimization. That is enough for tests.
pub(crate) fn lint_in_builds() -> bool {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // The compiler lies beside the cargo of its toolchain.
    let linter = Path::new(&cargo).with_file_name("clippy-driver");
    if !answers(Command::new(&linter).arg("--version")) {
        return false;
    }
    LINTER.get_or_init(|| linter);
    true
}

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package)
}

/// A command of the cargo that runs xtask, in the root of the repository.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    forget_xtask(&mut command);
    command
}

/// Gives a build command the environment that it would have in a shell.
pub(crate) fn forget_xtask(command: &mut Command) {
    // Cargo sets variables about xtask's package. Some build scripts run again when these variables change. So builds
    // from xtask and builds from a shell would invalidate each other.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    // A relative target directory is relative to the caller's directory, not to the root.
    for name in ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"] {
        if let Some(dir) = std::env::var_os(name).filter(|dir| !dir.is_empty())
            && let Ok(dir) = std::path::absolute(dir)
        {
            command.env(name, dir);
        }
    }
    if let Some(linter) = LINTER.get() {
        command.env("RUSTC_WORKSPACE_WRAPPER", linter);
    }
}

/// The part of `cargo metadata` that the tasks use.
///
/// It is read without serde's derive: its compilation would delay `cargo xtask demo` on a new machine.
pub(crate) struct Metadata {
    pub(crate) packages: Vec<Package>,
    pub(crate) target_directory: PathBuf,
}

/// A package of the workspace.
pub(crate) struct Package {
    name: String,
    version: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
}

pub(crate) struct Dependency {
    /// `None` for a normal dependency, else `dev` or `build`.
    pub(crate) kind: Option<String>,
    /// The directory of a dependency within the workspace.
    pub(crate) path: Option<PathBuf>,
}

impl Metadata {
    /// The version of a package of the workspace.
    pub(crate) fn version(&self, name: &str) -> Result<String> {
        let package = self.packages.iter().find(|package| package.name == name);
        let package = package.with_context(|| format!("the workspace has no package {name}"))?;
        Ok(package.version.clone())
    }
}

pub(crate) fn metadata() -> Result<Metadata> {
    let output = cargo(&["metadata", "--format-version", "1", "--no-deps"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo metadata")?;
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .context("cannot read the output of cargo metadata")?;
    Ok(Metadata {
        packages: list(&metadata, "packages")?
            .iter()
            .map(package)
            .collect::<Result<_>>()?,
        target_directory: text(&metadata, "target_directory")?.into(),
    })
}

fn package(package: &Value) -> Result<Package> {
    let optional = |value: &Value| value.as_str().map(str::to_owned);
    let dependencies = list(package, "dependencies")?.iter();
    Ok(Package {
        name: text(package, "name")?.to_owned(),
        version: text(package, "version")?.to_owned(),
        manifest_path: text(package, "manifest_path")?.into(),
        dependencies: dependencies
            .map(|dependency| Dependency {
                kind: optional(&dependency["kind"]),
                path: optional(&dependency["path"]).map(PathBuf::from),
            })
            .collect(),
    })
}

pub(crate) fn list<'a>(of: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    let list = of[name].as_array();
    list.with_context(|| format!("cargo metadata has no list {name}"))
}

pub(crate) fn text<'a>(of: &'a Value, name: &str) -> Result<&'a str> {
    let text = of[name].as_str();
    text.with_context(|| format!("cargo metadata has no text {name}"))
}

/// Where cargo builds: `CARGO_TARGET_DIR`, cargo's configuration, or `target`.
pub(crate) fn target_dir() -> Result<PathBuf> {
    Ok(metadata()?.target_directory)
}

/// Where rustc keeps the standard library of a target; absent if it is not installed.
pub(crate) fn rustc_libraries(target: &str) -> Result<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut print = Command::new(rustc);
    print.args(["--print", "target-libdir", "--target", target]);
    let output = print.current_dir(root()).output();
    let output = output.context("cannot run rustc")?.stdout;
    let path = String::from_utf8(output).context("the path of rustc's libraries is not UTF-8")?;
    Ok(PathBuf::from(path.trim()))
}

/// Prints the command, runs it, and returns whether it succeeded.
pub(crate) fn succeeds(command: &mut Command) -> Result<bool> {
    let begun = announce(command);
    let status = command.status();
    let succeeded = status.with_context(|| cannot_run(command))?.success();
    say_how_long(begun);
    Ok(succeeded)
}

/// Runs an installed program.
///
/// # Errors
///
/// The program cannot be run, or it fails. Its output stands above the error.
pub(crate) fn must_succeed(command: &mut Command) -> Result<()> {
    if !succeeds(command)? {
        let program = Path::new(command.get_program());
        bail!("{} failed; its message is above", program.display());
    }
    Ok(())
}

/// Whether the program is installed.
///
/// # Errors
///
/// The program is installed and cannot be run, or it fails.
pub(crate) fn is_there(command: &mut Command) -> Result<bool> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(true),
        Ok(output) => bail!(
            "{command:?} failed: {}",
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| cannot_run(command)),
    }
}

/// Whether the program is installed and runs.
pub(crate) fn answers(command: &mut Command) -> bool {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Runs a command. Its output is printed as it comes, and each complete line also goes to `read`.
/// Returns whether the command succeeded.
pub(crate) fn watch(command: &mut Command, mut read: impl FnMut(&str)) -> Result<bool> {
    let begun = announce(command);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| cannot_run(command))?;
    let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        bail!("the child has no pipes");
    };
    let (lines, received) = mpsc::channel();
    let others = lines.clone();
    let threads = [
        std::thread::spawn(move || forward(stdout, &mut std::io::stdout(), &lines)),
        std::thread::spawn(move || forward(stderr, &mut std::io::stderr(), &others)),
    ];
    for line in received {
        read(&line);
    }
    for thread in threads {
        match thread.join() {
            Ok(outcome) => outcome.context("cannot pass output on")?,
            Err(_) => bail!("the thread that passes output on panicked"),
        }
    }
    let succeeded = child.wait()?.success();
    say_how_long(begun);
    Ok(succeeded)
}

/// A command, and the reader of its output's lines.
pub(crate) type Watched<'a> = (&'a mut Command, &'a mut (dyn FnMut(&str) + Send));

/// Like [`watch`], for two commands in parallel. The output of the second command is printed after
/// the first has ended. Returns whether each command succeeded.
pub(crate) fn watch_both(first: Watched<'_>, second: Watched<'_>) -> Result<[bool; 2]> {
    let (first, read_first) = first;
    let (second, read_second) = second;
    std::thread::scope(|scope| {
        let begun = announce(second);
        let name = cannot_run(second);
        let kept = scope.spawn(|| second.output());
        let first_succeeded = watch(first, read_first);
        let Ok(output) = kept.join() else {
            bail!("the thread that keeps output panicked");
        };
        let output = output.context(name)?;
        std::io::stdout().write_all(&output.stdout)?;
        std::io::stderr().write_all(&output.stderr)?;
        for kept in [&output.stdout, &output.stderr] {
            String::from_utf8_lossy(kept)
                .lines()
                .for_each(&mut *read_second);
        }
        say_how_long(begun);
        Ok([first_succeeded?, output.status.success()])
    })
}

fn forward(
    from: impl Read,
    to: &mut impl Write,
    lines: &mpsc::Sender<String>,
) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        to.flush()?;
        // The receiver lives as long as either pipe.
        let _ = lines.send(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
    }
    Ok(())
}

/// Prints the command. Returns the time.
fn announce(command: &Command) -> Instant {
    let words = command.get_args().map(|word| word.to_string_lossy());
    let words: Vec<_> = words.collect();
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    eprintln!("\n▶ {} {}", program.display(), words.join(" "));
    Instant::now()
}

fn say_how_long(begun: Instant) {
    let seconds = begun.elapsed().as_secs();
    if seconds > 0 {
        eprintln!("◀ {seconds} s");
    }
}

fn cannot_run(command: &Command) -> String {
    format!("cannot run {}", Path::new(command.get_program()).display())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports that it runs, waits until the other command reports so too, and writes to both
    /// outputs.
    fn waits_for(place: &Path, own: &str, other: &str, code: u8) -> Command {
        let script = "touch $0; for _ in $(seq 600); do
            if [ -e $1 ]; then echo $0 out; echo $0 err >&2; exit $2; fi; sleep 0.1
        done; echo $0 is alone; exit 9";
        let mut command = Command::new("sh");
        command
            .args(["-c", script, own, other])
            .arg(code.to_string());
        command.current_dir(place);
        command
    }

    #[test]
    fn a_program_that_is_there_and_fails_is_not_taken_for_a_missing_one() {
        assert!(is_there(&mut Command::new("true")).unwrap());
        assert!(!is_there(&mut Command::new("no-such-program")).unwrap());
        assert!(is_there(&mut Command::new("false")).is_err());
        assert!(must_succeed(&mut Command::new("true")).is_ok());
        let error = must_succeed(&mut Command::new("false")).unwrap_err();
        assert!(error.to_string().contains("false failed"), "{error}");
    }

    #[test]
    fn two_commands_run_beside_each_other_and_each_has_its_output_and_result() {
        let place = std::env::temp_dir().join(format!("kvpool-xtask-{}", std::process::id()));
        std::fs::create_dir(&place).unwrap();
        for codes in [[0, 1], [1, 0], [0, 0]] {
            let mut one = waits_for(&place, "one", "two", codes[0]);
            let mut two = waits_for(&place, "two", "one", codes[1]);
            let (mut of_one, mut of_two) = (Vec::new(), Vec::new());
            let succeeded = watch_both(
                (&mut one, &mut |line| of_one.push(line.to_owned())),
                (&mut two, &mut |line| of_two.push(line.to_owned())),
            );
            assert_eq!(succeeded.unwrap(), codes.map(|code| code == 0));
            of_one.sort();
            assert_eq!(of_one, ["one err", "one out"]);
            assert_eq!(of_two, ["two out", "two err"]);
            std::fs::remove_file(place.join("one")).unwrap();
            std::fs::remove_file(place.join("two")).unwrap();
        }
        std::fs::remove_dir(&place).unwrap();
    }
}
