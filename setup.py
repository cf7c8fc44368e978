"Packaging, read from settings.ini so that nbdev and pip never disagree."
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here/"settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    url=cfg["git_url"],
    packages=[cfg["lib_name"]],
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={"console_scripts": cfg["console_scripts"].split("\n")},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Education",
                 "Programming Language :: Python :: 3"],
)
